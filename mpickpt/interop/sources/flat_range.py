"""Finds the boxes of a global array that a range of its flat elements makes up.

Pure arithmetic; touches nothing.
"""

import math

from mpickpt.format.hyperslab import Hyperslab


def boxes_of_flat_range(
    shape: tuple[int, ...], start: int, stop: int
) -> list[tuple[Hyperslab, int]]:
    """Cut a range of the elements of a C-ordered array in boxes.

    Parameters
    ----------
    shape : tuple of int
        Shape (N_0, ..., N_{d-1}) of the array.
    start, stop : int
        The range in its flattened elements, 0 <= start <= stop <= their number.

    Returns
    -------
    list of (Hyperslab, int)
        In C order, at most 2 d - 1 boxes, none empty, each one run of elements that
        begins at the flat index beside it.

    Raises
    ------
    ValueError
        If the range does not lie inside the array.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"[{start}, {stop}) is not inside an array of shape {shape}")
    boxes: list[tuple[Hyperslab, int]] = []
    while start < stop:
        box = _largest_box(shape, start, stop)
        boxes.append((box, start))
        start += box.size
    return boxes


def _largest_box(shape: tuple[int, ...], start: int, stop: int) -> Hyperslab:
    """Return the longest box that begins at `start` and ends before `stop`."""
    offset = []
    for axis in range(len(shape)):
        inner = math.prod(shape[axis + 1 :])
        index, rest = divmod(start, inner)
        index %= shape[axis]
        offset.append(index)
        rows = min(shape[axis] - index, (stop - start) // inner)
        if rest == 0 and rows > 0:
            outer = tuple(1 for _ in range(axis))
            inside = shape[axis + 1 :]
            place = (*offset, *(0 for _ in inside))
            return Hyperslab(place, (*outer, rows, *inside))
    return Hyperslab((), ())
