"""Tells exactly whether boxes tile a box; touches nothing."""

from collections.abc import Sequence

import numpy as np

from mpickpt.format.corners import Indices, corner_arrays
from mpickpt.format.hyperslab import Hyperslab


def first_wrong_index(
    room: Hyperslab, tiles: Sequence[Hyperslab]
) -> tuple[tuple[int, ...], int] | None:
    """Find where boxes fail to cover a room exactly once.

    Parameters
    ----------
    room : Hyperslab
        The box to be covered.
    tiles : sequence of Hyperslab
        Boxes inside `room`, each with at least one element.

    Returns
    -------
    tuple of (tuple of int, int) or None
        The first such index in C order and the number of boxes too many that hold
        it, -1 for a gap. None where the boxes tile the room.

    Notes
    -----
    Each box is the sum of its 2^d corners, with alternating signs. Boxes tile a room
    when their corners, less those of the room, cancel. If not, the first corner that
    stays is the first index covered wrongly, and its weight tells how wrongly.
    """
    if room.is_empty:
        return None
    starts, stops = corner_arrays([room, *tiles])
    split = np.flatnonzero(np.any((starts != starts[0]) | (stops != stops[0]), axis=0))
    if not len(split):
        excess = len(tiles) - 1
        return (room.offset, excess) if excess else None
    intervals = np.stack([starts[:, split], stops[:, split]], axis=2)
    corners, weights = _residual(intervals.reshape(len(starts), -1))
    if not len(corners):
        return None
    index = np.array(room.offset, dtype=np.int64)
    index[split] = corners[0]
    return tuple(index.tolist()), int(weights[0])


def _residual(intervals: Indices) -> tuple[Indices, Indices]:
    """Return the corners that do not cancel, in C order, and their weights.

    `intervals` has columns start, stop for each axis; its first row is the room. One
    axis is turned into corners at a time, so that what cancels early is gone early.
    """
    rows = intervals
    weights = np.ones(len(rows), dtype=np.int64)
    weights[0] = -1
    for axis in range(rows.shape[1] // 2):
        opening = np.delete(rows, axis + 1, axis=1)
        closing = np.delete(rows, axis, axis=1)
        rows = np.concatenate([opening, closing])
        rows, weights = _summed(rows, np.concatenate([weights, -weights]))
    return rows, weights


def _summed(rows: Indices, weights: Indices) -> tuple[Indices, Indices]:
    """Return the distinct rows, sorted, whose weights do not add up to zero."""
    if not len(rows):
        return rows, weights
    order = np.lexsort(rows.T[::-1])
    rows = rows[order]
    is_new = np.concatenate([[True], np.any(rows[1:] != rows[:-1], axis=1)])
    firsts = np.flatnonzero(is_new)
    sums = np.add.reduceat(weights[order], firsts)
    stays = sums != 0
    return rows[firsts[stays]], sums[stays]
