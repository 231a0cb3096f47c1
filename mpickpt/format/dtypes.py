"""Names element types and says how they lie in HDF5; touches nothing.

Known are numpy's bool, int, float, complex, datetime64 and timedelta64 types and
strings of fixed length, in both byte orders, and the bfloat16 and float8 types of
`ml_dtypes`, in the machine's.
"""

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

DType = np.dtype[Any]

DTYPE_ATTRIBUTE = "mpickpt_dtype"

_ML_NAMES = (
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
# (bits of mantissa, bytes) -> the format of C's long double on some platform.
_LONG_DOUBLES = {
    (63, 16): "x87",
    (63, 12): "x87_12",
    (105, 16): "ibm",
    (112, 16): "binary128",
}
_X87_NBYTES = 10
_NAME = re.compile(
    r"""
      bool | u?int(?:8|16|32|64) | float(?:16|32|64) | complex(?:64|128)
    | >[iu][248] | >f[248] | >c(?:8|16)
    | (?:datetime64 | timedelta64 | >M8 | >m8)
      (?:\[ (?:[2-9]|[1-9][0-9]{1,8})? (?:[YMWDhms]|ms|us|ns|ps|fs|as) \])?
    | (?:S | >?U) [1-9][0-9]{0,8}
    | """
    + " | ".join(_ML_NAMES)
    + r" | >?c?longdouble\[(?:"
    + "|".join(_LONG_DOUBLES.values())
    + r")\]",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFields:
    """The bits of an HDF5 float type that numpy has no name for.

    Positions and lengths are in bits, from the least significant one.
    """

    nbytes: int
    sign_position: int
    exponent_position: int
    exponent_nbits: int
    exponent_bias: int
    mantissa_position: int
    mantissa_nbits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSpec:
    """How the elements of an array lie in an HDF5 dataset; the bytes are the same.

    Parameters
    ----------
    numpy : dtype or None
        Type whose HDF5 counterpart the dataset has; None when `float_fields` says it.
    float_fields : FloatFields or None
        A true HDF5 float type without a numpy counterpart.
    extra_axis : int or None
        Length of an axis that the dataset has after those of the array.
    attribute : str or None
        Name of the type, written as attribute `DTYPE_ATTRIBUTE` because the dataset's
        own type does not tell it.
    """

    numpy: DType | None = None
    float_fields: FloatFields | None = None
    extra_axis: int | None = None
    attribute: str | None = None


_FLOAT_FIELDS = {
    "bfloat16": FloatFields(
        nbytes=2,
        sign_position=15,
        exponent_position=7,
        exponent_nbits=8,
        exponent_bias=127,
        mantissa_position=0,
        mantissa_nbits=7,
    ),
    "float8_e5m2": FloatFields(
        nbytes=1,
        sign_position=7,
        exponent_position=2,
        exponent_nbits=5,
        exponent_bias=15,
        mantissa_position=0,
        mantissa_nbits=2,
    ),
}


def check_dtype(dtype: DType) -> None:
    """Raise TypeError, which says what is allowed, when a type cannot be saved."""
    dtype_name(dtype)


# numpy takes microseconds to spell a name, and ten thousand arrays have few types.
@lru_cache(maxsize=1 << 10)
def dtype_name(dtype: DType) -> str:
    """Return the name that a type has in records.

    numpy's own name for little-endian types ("float16", "datetime64[ns]"), ">f4" for
    big-endian ones, "S5" and "U7" for strings, "longdouble[x87]" and
    "clongdouble[x87]" with the machine's format for long doubles.

    Raises
    ------
    TypeError
        If the type cannot be saved.
    """
    name = _spelled(dtype)
    if not is_dtype_name(name):
        raise TypeError(
            f"arrays of dtype {str(dtype)!r} cannot be saved; allowed are bool, int, "
            "float, complex, longdouble, datetime64, timedelta64, fixed strings "
            "(S5, U7), and bfloat16 and float8 of ml_dtypes"
        )
    return name


def is_dtype_name(name: str) -> bool:
    """Tell whether some machine knows a type of that name; this one may not."""
    return _NAME.fullmatch(name) is not None


@lru_cache(maxsize=1 << 10)
def parse_dtype(name: str) -> DType:
    """Return the type of a name that `dtype_name` gave.

    Raises
    ------
    ValueError
        If the name is unknown, or this machine does not have the type.
    """
    if not is_dtype_name(name):
        raise ValueError(f"unknown dtype name {name!r}")
    if name in _ML_NAMES:
        return _ml_dtype(name)
    if "longdouble" in name:
        return _long_double(name)
    try:
        return np.dtype(name) if name[0] == ">" else np.dtype(name).newbyteorder("<")
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"numpy has no dtype {name!r}: {error}") from error


def storage_spec(dtype: DType) -> StorageSpec:
    """Return how the elements of a type lie in an HDF5 dataset."""
    name = dtype_name(dtype)
    if name in _FLOAT_FIELDS:
        return StorageSpec(float_fields=_FLOAT_FIELDS[name])
    if name in _ML_NAMES:
        return StorageSpec(numpy=np.dtype("u1"), attribute=name)
    order = ">" if name[0] == ">" else "<"
    if dtype.kind in "mM":
        return StorageSpec(numpy=np.dtype(f"{order}i8"), attribute=name)
    if dtype.kind == "U":
        code_points = np.dtype(f"{order}u4")
        length = dtype.itemsize // code_points.itemsize
        return StorageSpec(numpy=code_points, extra_axis=length, attribute=name)
    if name.startswith(">clongdouble"):
        # h5py gives the two members of this type the other byte order.
        part = np.dtype(np.longdouble).newbyteorder(">")
        return StorageSpec(numpy=part, extra_axis=2, attribute=name)
    return StorageSpec(numpy=dtype)


def clear_padding(view: np.ndarray[Any, np.dtype[np.uint8]], dtype: DType) -> None:
    """Zero the bytes of 80-bit long doubles that belong to no number, in place.

    They hold what lay in memory before, so digests would differ from save to save.

    Parameters
    ----------
    view : ndarray of uint8, shape (n,)
        Whole elements; nothing is done to elements without padding.
    dtype : dtype
        Type of the elements.
    """
    if not _is_long_double(dtype) or not _long_double_tag().startswith("x87"):
        return
    part_nbytes = np.dtype(np.longdouble).itemsize
    parts = view.reshape(-1, part_nbytes)
    if dtype.str[0] == ">":
        parts[:, : part_nbytes - _X87_NBYTES] = 0
    else:
        parts[:, _X87_NBYTES:] = 0


def _spelled(dtype: DType) -> str:
    big = dtype.str[0] == ">" and dtype.itemsize > 1
    if _is_long_double(dtype):
        part = "clongdouble" if dtype.kind == "c" else "longdouble"
        return f"{'>' if big else ''}{part}[{_long_double_tag()}]"
    if big:
        return dtype.str
    return dtype.str[1:] if dtype.kind in "SU" else dtype.name


def _is_long_double(dtype: DType) -> bool:
    # Where long double is double, numpy's two types are one type on disk as well.
    return (
        dtype.type in (np.longdouble, np.clongdouble)
        and np.dtype(np.longdouble) != np.float64
    )


@cache
def _long_double_tag() -> str:
    size = (int(np.finfo(np.longdouble).nmant), np.dtype(np.longdouble).itemsize)
    return _LONG_DOUBLES.get(size, "unknown")


def _long_double(name: str) -> DType:
    body, tag = name.removeprefix(">").removesuffix("]").split("[")
    if tag != _long_double_tag():
        raise ValueError(
            f"{name} is not this machine's long double, which is {_long_double_tag()}"
        )
    return np.dtype(body).newbyteorder(">" if name[0] == ">" else "<")


def _ml_dtype(name: str) -> DType:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ValueError(f"{name} needs ml_dtypes: pip install ml_dtypes") from error
    if not hasattr(ml_dtypes, name):
        raise ValueError(f"{name} needs a newer ml_dtypes than {ml_dtypes.__version__}")
    dtype: DType = np.dtype(getattr(ml_dtypes, name))
    return dtype
