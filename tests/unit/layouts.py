"""Makes boxes and descriptions of arrays for the tests of layouts."""

import numpy as np
from hypothesis import strategies as st

from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.planning.layout import HeldArray
from mpickpt.planning.resolve import resolve_array

KEY = "model/w"
MIB = 1 << 20


def box(*ranges):
    """Return the box of the given (start, stop) ranges."""
    return Hyperslab(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))


def sharded(global_shape, *boxes, dtype="float32"):
    return HeldArray(
        key=KEY, kind="sharded", dtype=dtype, global_shape=global_shape, boxes=boxes
    )


def block(*shape, dtype="float32"):
    return sharded(None, Hyperslab((0,) * len(shape), shape), dtype=dtype)


def replicated(shape, dtype="float32", held=True):
    boxes = (whole(shape),) if held else ()
    return HeldArray(
        key=KEY, kind="replicated", dtype=dtype, global_shape=shape, boxes=boxes
    )


def of_kind(kind, dtype=None, boxes=()):
    return HeldArray(key=KEY, kind=kind, dtype=dtype, global_shape=None, boxes=boxes)


def resolve(*held):
    return resolve_array(KEY, list(enumerate(held)))


@st.composite
def tilings(draw, max_cuts=6, extent=6):
    """Draw a global shape and boxes that tile it, made by repeated cuts."""
    shape = tuple(draw(st.lists(st.integers(1, extent), min_size=0, max_size=3)))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, max_cuts)) if shape else 0):
        chosen = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        length = chosen.shape[axis]
        cut = draw(st.integers(0, length))
        boxes += [
            _resized(chosen, axis, 0, cut),
            _resized(chosen, axis, cut, length - cut),
        ]
    return shape, boxes


def _resized(chosen, axis, shift, length):
    offset, shape = list(chosen.offset), list(chosen.shape)
    offset[axis] += shift
    shape[axis] = length
    return Hyperslab(tuple(offset), tuple(shape))


def coverage(shape, boxes):
    counts = np.zeros(shape, dtype=int)
    for one in boxes:
        counts[one.slices()] += 1
    return counts
