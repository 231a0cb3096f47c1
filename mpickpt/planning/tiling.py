"""Tells exactly whether boxes tile a box; touches nothing."""

from collections.abc import Sequence

import numpy as np

from mpickpt.format.corners import Indices, corner_arrays
from mpickpt.format.hyperslab import Hyperslab

# Numbers of all corners at one time; 8 MiB, unless the boxes themselves are more.
_MOST_NUMBERS = 1 << 20
_MOST_GROWTH = 16


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
    if room.is_empty or (len(tiles) == 1 and tiles[0] == room):
        return None
    return first_wrong_corner(*corner_arrays([room, *tiles]))


def first_wrong_corner(
    starts: Indices, stops: Indices
) -> tuple[tuple[int, ...], int] | None:
    """Find where boxes fail to cover a room exactly once, given by their corners.

    Parameters
    ----------
    starts, stops : ndarray of int64, shape (1 + boxes, ndim)
        First and end corners; the first row is the room, which is not empty.

    Returns
    -------
    tuple of (tuple of int, int) or None
        As `first_wrong_index`.
    """
    split = np.flatnonzero(np.any((starts != starts[0]) | (stops != stops[0]), axis=0))
    if not len(split):
        excess = len(starts) - 2
        return (tuple(starts[0].tolist()), excess) if excess else None
    intervals = np.stack([starts[:, split], stops[:, split]], axis=2)
    residual = _residual(intervals.reshape(len(starts), -1))
    if residual is None:
        wrong = _first_wrong_cell(intervals[..., 0], intervals[..., 1])
    else:
        corners, weights = residual
        wrong = (corners[0], int(weights[0])) if len(corners) else None
    if wrong is None:
        return None
    index = starts[0].copy()
    index[split] = wrong[0]
    return tuple(index.tolist()), wrong[1]


def _residual(intervals: Indices) -> tuple[Indices, Indices] | None:
    """Return the corners that do not cancel, in C order, and their weights.

    `intervals` has columns start, stop for each axis; its first row is the room. One
    axis is turned into corners at a time, so that what cancels early is gone early.
    None where too few do: an enemy's boxes have 2^d corners that stay.
    """
    rows, most = intervals, max(_MOST_NUMBERS, _MOST_GROWTH * intervals.size)
    weights = np.ones(len(rows), dtype=np.int64)
    weights[0] = -1
    for axis in range(rows.shape[1] // 2):
        if rows.size > most:
            return None
        opening = np.delete(rows, axis + 1, axis=1)
        closing = np.delete(rows, axis, axis=1)
        rows = np.concatenate([opening, closing])
        rows, weights = _summed(rows, np.concatenate([weights, -weights]))
    return rows, weights


def _first_wrong_cell(starts: Indices, stops: Indices) -> tuple[Indices, int] | None:
    """Return an index that is covered wrongly, and how; None where none is.

    The room, in the first row, is cut in two at an edge of a box, again and again,
    until boxes cover their cells as a whole: slow, but of little memory.
    """
    cells = [(starts[0], stops[0], np.arange(1, len(starts)))]
    while cells:
        low, high, inside = cells.pop()
        partly = (starts[inside] > low) | (stops[inside] < high)
        n_covering = int(np.sum(~partly.any(axis=1)))
        if n_covering > 1 or not len(inside):
            return low, n_covering - 1
        if n_covering == len(inside):
            continue
        number, axis = np.argwhere(partly)[0]
        box = inside[number]
        cut = starts[box, axis] if starts[box, axis] > low[axis] else stops[box, axis]
        middle_high, middle_low = high.copy(), low.copy()
        middle_high[axis] = middle_low[axis] = cut
        cells += [
            (middle_low, high, inside[stops[inside, axis] > cut]),
            (low, middle_high, inside[starts[inside, axis] < cut]),
        ]
    return None


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
