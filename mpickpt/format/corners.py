"""Does arithmetic on many boxes at once, by their corners; touches nothing."""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mpickpt.format.hyperslab import Hyperslab

Indices = npt.NDArray[np.int64]


def corner_arrays(boxes: Sequence[Hyperslab]) -> tuple[Indices, Indices]:
    """Return first and end corners of boxes, two arrays of shape (boxes, ndim).

    At least one box, all of one ndim. An offset that int64 cannot hold is an
    `OverflowError`; where only the sum of offset and shape is too large, it wraps.
    """
    starts = _index_array([box.offset for box in boxes])
    return starts, starts + _index_array([box.shape for box in boxes])


def first_outside(room: Hyperslab, boxes: Sequence[Hyperslab]) -> int | None:
    """Return the position of the first box that is not inside a room.

    Parameters
    ----------
    room : Hyperslab
        A whole array: it starts at index 0.
    boxes : sequence of Hyperslab
        May be anything: of other ndim, negative, beyond int64.
    """
    if not boxes or _all_inside(room, boxes):
        return None
    fits = (_have_ndim(room.ndim, [box]) and _is_inside(room, box) for box in boxes)
    return list(fits).index(False)


def _have_ndim(ndim: int, boxes: Sequence[Hyperslab]) -> bool:
    return all(len(box.offset) == len(box.shape) == ndim for box in boxes)


def _is_inside(room: Hyperslab, box: Hyperslab) -> bool:
    return min(box.shape, default=0) >= 0 and room.contains(box)


def _all_inside(room: Hyperslab, boxes: Sequence[Hyperslab]) -> bool:
    if not _have_ndim(room.ndim, boxes):
        return False
    try:
        starts, stops = corner_arrays(boxes)
    except OverflowError:
        return False
    # A stop that wrapped around is negative, so it lies before its start.
    fits = (
        (starts >= 0)
        & (stops >= starts)
        & (stops <= np.array(room.shape, dtype=np.int64))
    )
    return bool(fits.all())


def _index_array(indices: Sequence[tuple[int, ...]]) -> Indices:
    # Three times as fast as numpy.array, which looks at every tuple for its type.
    count = len(indices), len(indices[0])
    numbers = itertools.chain.from_iterable(indices)
    return np.fromiter(numbers, np.int64, count[0] * count[1]).reshape(count)
