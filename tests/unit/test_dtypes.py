"""Names of element types and how they lie in HDF5."""

import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format import dtypes
from mpickpt.format.dtypes import (
    check_dtype,
    clear_padding,
    dtype_name,
    is_dtype_name,
    parse_dtype,
    storage_spec,
)

ML_DTYPES = [
    np.dtype(getattr(ml_dtypes, name))
    for name in dir(ml_dtypes)
    if name.startswith(("bfloat16", "float8_"))
]
NUMBERS = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g"]
OTHERS = ["c8", "c16", "G", "M8", "M8[ns]", "M8[25s]", "m8[D]", "S1", "S5", "U1", "U7"]
NUMPY_DTYPES = [np.dtype(order + code) for order in "<>" for code in NUMBERS + OTHERS]
SAVED = pytest.mark.parametrize("dtype", NUMPY_DTYPES + ML_DTYPES, ids=str)
x87 = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant != 63, reason="long double is not x87"
)


@SAVED
def test_dtype_name_parses_back(dtype):
    assert parse_dtype(dtype_name(dtype)) == dtype


def test_dtype_names_differ():
    all_dtypes = set(NUMPY_DTYPES + ML_DTYPES)

    assert len(set(map(dtype_name, all_dtypes))) == len(all_dtypes)


@pytest.mark.parametrize(
    ("code", "name"),
    [("<f2", "float16"), (">f4", ">f4"), ("?", "bool"), (">i1", "int8"), ("S5", "S5")]
    + [("<U7", "U7"), (">U7", ">U7"), ("<M8[ns]", "datetime64[ns]")]
    + [(">m8[25s]", ">m8[25s]"), (ml_dtypes.bfloat16, "bfloat16")]
    + [pytest.param("g", "longdouble[x87]", marks=x87)]
    + [pytest.param(">G", ">clongdouble[x87]", marks=x87)],
)
def test_dtype_name_is_written_as_specified(code, name):
    assert dtype_name(np.dtype(code)) == name


@pytest.mark.parametrize(
    "dtype",
    [object, [("a", "f4")], "V8", ("f4", (2,)), "S0", "U0", ml_dtypes.int4]
    + [ml_dtypes.uint2, ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn],
    ids=str,
)
def test_check_dtype_refuses_and_says_what_is_allowed(dtype):
    with pytest.raises(TypeError, match="allowed are bool, int"):
        check_dtype(np.dtype(dtype))


@pytest.mark.parametrize(
    "name",
    ["", "object", "f4", "<f4", "float128", "f4,f4", "(2,)f4", ">f1", "S0", "U", "V8"]
    + ["bool\n", "S-1", "U٣", "datetime64[1s]", "datetime64[s/3]", "int4", "Float16"]
    + ["S" + "9" * 10**6, "longdouble", "longdouble[]", "float32 | int8"],
    ids=lambda name: name[:20],
)
def test_parse_dtype_refuses_unknown_names(name):
    assert not is_dtype_name(name)
    with pytest.raises(ValueError):
        parse_dtype(name)


@pytest.mark.parametrize("name", ["longdouble[ibm]", "U999999999"])
def test_parse_dtype_refuses_what_this_machine_does_not_have(name):
    assert is_dtype_name(name)
    with pytest.raises(ValueError):
        parse_dtype(name)


@given(st.text(max_size=12) | st.from_regex(dtypes._NAME, fullmatch=True))
def test_parse_dtype_returns_what_was_named_or_raises_value_error(name):
    try:
        dtype = parse_dtype(name)
    except ValueError:
        return

    assert dtype_name(dtype) == name


def test_parse_dtype_says_how_to_get_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    parse_dtype.cache_clear()

    with pytest.raises(ValueError, match="pip install ml_dtypes"):
        parse_dtype("bfloat16")


@SAVED
def test_storage_spec_keeps_the_number_of_bytes(dtype):
    spec = storage_spec(dtype)

    stored = spec.float_fields.nbytes if spec.float_fields else spec.numpy.itemsize
    assert stored * (spec.extra_axis or 1) == dtype.itemsize


@SAVED
def test_storage_spec_names_every_type_that_hdf5_does_not_tell(dtype):
    spec = storage_spec(dtype)

    tells = spec.float_fields is not None or spec.numpy == dtype
    assert spec.attribute == (None if tells else dtype_name(dtype))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_float_fields_describe_the_bits(name):
    dtype = np.dtype(getattr(ml_dtypes, name))
    fields = storage_spec(dtype).float_fields

    bits = int(np.array(-1.5, dtype).view(f"u{fields.nbytes}"))

    sign = bits >> fields.sign_position
    exponent = bits >> fields.exponent_position & ((1 << fields.exponent_nbits) - 1)
    mantissa = bits >> fields.mantissa_position & ((1 << fields.mantissa_nbits) - 1)
    assert (sign, exponent) == (1, fields.exponent_bias)
    assert mantissa == 1 << (fields.mantissa_nbits - 1)


@x87
@pytest.mark.parametrize("code", ["<g", ">g", "<G", ">G"])
def test_clear_padding_zeroes_what_is_no_number(code):
    values = np.array([1, -2.5, np.pi, np.inf], np.dtype(code))
    one, other = np.zeros(values.nbytes, "u1"), np.full(values.nbytes, 255, "u1")
    significant = _significant_bytes(values.dtype, values.size)
    for memory in (one, other):
        memory[significant] = values.view("u1")[significant]

    clear_padding(other, values.dtype)

    assert np.array_equal(one, other)
    assert np.array_equal(other.view(values.dtype), values)


@pytest.mark.parametrize("code", ["f8", "c16", "S16", ml_dtypes.float8_e4m3fnuz])
def test_clear_padding_leaves_types_without_padding(code):
    memory = np.full(64, 255, "u1")

    clear_padding(memory, np.dtype(code))

    assert (memory == 255).all()


def _significant_bytes(dtype, count):
    part = np.zeros(np.dtype("g").itemsize, bool)
    part[:10] = True
    if dtype.str[0] == ">":
        part = part[::-1]
    return np.tile(part, count * dtype.itemsize // part.size)
