"""Casts to shorter floats: one rounding to nearest, ties to even."""

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpickpt.interop.safetensors.float_casts import cast_floats, count_overflows

ml_dtypes = pytest.importorskip("ml_dtypes")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHORT = {"bfloat16": BFLOAT16, "float16": np.dtype("f2"), "float32": np.dtype("f4")}


def expected(value, dtype):
    """Round by exact arithmetic; `value` is finite."""
    bits = {"bfloat16": (8, 8), "float16": (5, 11), "float32": (8, 24)}[dtype.name]
    exponent_bits, precision = bits
    bias = 2 ** (exponent_bits - 1) - 1
    exact = abs(Fraction(value))
    if not exact:
        return np.array(value, dtype)
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= exact < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, 1 - bias) - precision + 1)
    rounded = round(exact / quantum) * quantum  # round() of a Fraction: ties to even
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** bias
    sign = np.copysign(1.0, value)
    magnitude = np.inf if rounded > largest else float(rounded)
    return np.array(sign * magnitude, np.float64).astype(dtype)


@pytest.mark.parametrize("name", SHORT)
@given(value=st.floats(allow_nan=False, allow_infinity=False))
@example(value=1 + 2**-8 + 2**-30)
@example(value=1 + 2**-8)
@example(value=1 + 3 * 2**-8)
@example(value=-(1 + 2**-11 + 2**-40))
@example(value=3.3895313892515355e38)
@example(value=3.4028235e38)
@example(value=65519.999999999)
@example(value=65520.0)
@example(value=-(2**-134) * (1 + 2**-40))
@example(value=2**-25 * (1 + 2**-40))
@example(value=5e-324)
@example(value=-0.0)
def test_cast_rounds_once(name, value):
    dtype = SHORT[name]

    found = cast_floats(np.array([value]), dtype)

    assert found.tobytes() == expected(value, dtype).tobytes()


@given(bits=st.integers(0, 2**32 - 1))
def test_cast_of_float32_rounds_to_nearest(bits):
    (value,) = struct.unpack("f", struct.pack("I", bits))
    if np.isfinite(value):
        found = cast_floats(np.array([value], "f4"), BFLOAT16)
        assert found.tobytes() == expected(value, BFLOAT16).tobytes()


@pytest.mark.parametrize("source", ["f8", ">f8", "g", "f4", "f2", BFLOAT16])
@pytest.mark.parametrize("name", SHORT)
def test_cast_keeps_what_is_no_number(source, name):
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.5], source)

    found = cast_floats(special, SHORT[name])

    np.testing.assert_array_equal(found.astype("f8"), special.astype("f8"))
    assert np.signbit(found[3].astype("f8"))
    assert not count_overflows(special, found)


def test_overflows_are_counted():
    numbers = np.array([1.0, 7e4, -1e300, np.inf])

    assert count_overflows(numbers, cast_floats(numbers, np.dtype("f2"))) == 2
