"""Casts numbers to shorter floats, rounded once, to nearest even; touches nothing."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def is_float(dtype: np.dtype[Any]) -> bool:
    """Tell whether a type is a real float, of numpy or of `ml_dtypes`."""
    # Those types that another package adds are all floats, of what can be saved.
    return dtype.kind == "f" or dtype.isbuiltin == 2


def cast_floats(elements: Array, dtype: np.dtype[Any]) -> Array:
    """Return floats as another float type, rounded to nearest, ties to even.

    What is too large becomes an infinity, as IEEE 754 has it. What has that type
    already is returned as it is; other numbers may differ in their byte order only.
    """
    if elements.dtype == dtype:
        return elements
    if dtype.itemsize == 2 and elements.dtype.itemsize > 4:
        # numpy and ml_dtypes go by way of a float32 and would round twice.
        elements = _rounded_to_odd(elements)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return elements.astype(dtype)


def count_overflows(before: Array, after: Array) -> int:
    """Return how many finite numbers a cast has made infinite."""
    infinite = np.isinf(after)
    if not infinite.any():
        return 0
    return int(np.count_nonzero(infinite & np.isfinite(before)))


def _rounded_to_odd(elements: Array) -> Array:
    """Return float32 whose last bit says whether anything was cut off.

    Of 24 bits, it is far from where a float of 11 bits or fewer is rounded, so that
    the second rounding gives what one rounding of the original would.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = np.array(elements, np.float32)
        back = near.astype(elements.dtype)
        is_cut = (back != elements) & ~np.isnan(near)
        is_beyond = np.abs(back) > np.abs(elements)
    bits = near.view(np.uint32)
    bits -= is_beyond.astype(np.uint32)
    bits |= is_cut.astype(np.uint32)
    return near
