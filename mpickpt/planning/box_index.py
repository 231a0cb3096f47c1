"""Finds those of many boxes that meet a given one, without asking each; pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from mpickpt.format.hyperslab import Hyperslab


class BoxIndex:
    """Boxes of one array, sorted along each axis.

    Parameters
    ----------
    boxes : sequence of Hyperslab
        All of one ndim; they may overlap.

    Notes
    -----
    A search costs a bisection along each axis and a look at the boxes that reach the
    given one on the axis which tells most of them apart.
    """

    def __init__(self, boxes: Sequence[Hyperslab]) -> None:
        self._boxes = boxes
        ndim = boxes[0].ndim if boxes else 0
        self._axes = [_Axis(boxes, axis) for axis in range(ndim)]

    def meeting(self, box: Hyperslab) -> Iterator[tuple[int, Hyperslab]]:
        """Yield the position of each box that meets `box`, and what both cover."""
        candidates: Sequence[int] = range(len(self._boxes))
        reached = [axis.reached(box) for axis in self._axes]
        if reached:
            low, high, order = min(reached, key=lambda found: found[1] - found[0])
            candidates = order[low:high]
        for position in candidates:
            both = self._boxes[position].intersect(box)
            if both is not None:
                yield position, both


class _Axis:
    """The boxes in the order in which they start along one axis."""

    def __init__(self, boxes: Sequence[Hyperslab], axis: int) -> None:
        self._axis = axis
        spans = [
            (box.offset[axis], box.offset[axis] + box.shape[axis]) for box in boxes
        ]
        self._order = sorted(range(len(boxes)), key=spans.__getitem__)
        self._starts = [spans[i][0] for i in self._order]
        # Stops need not ascend in this order, but the farthest stop so far does.
        self._farthest = list(accumulate((spans[i][1] for i in self._order), max))

    def reached(self, box: Hyperslab) -> tuple[int, int, Sequence[int]]:
        """Return a range in an order of the boxes: no other box meets this one."""
        start = box.offset[self._axis]
        low = bisect_right(self._farthest, start)
        high = bisect_left(self._starts, start + box.shape[self._axis])
        return low, max(low, high), self._order
