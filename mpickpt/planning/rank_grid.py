"""Names many ranks in a few numbers where they form a grid; touches nothing.

Of a job that is parallel in several ways at once (tensor, pipeline, data), those ranks
that hold one box are a grid in rank space. Each of them is told who the others are,
so a list would make the messages grow with the square of the number of ranks.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import overload

import numpy as np

from mpickpt.format.layout_document import Ranks


@dataclass(frozen=True, slots=True)
class RankGrid(Sequence[int]):
    """Ascending ranks ``start + i * stride + j * stride' + ...``.

    Parameters
    ----------
    start : int
        The lowest rank.
    axes : tuple of (int, int)
        Count and stride of each axis, the outermost first; a stride is larger than
        all that lies inside it.
    """

    start: int
    axes: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return prod(count for count, _ in self.axes)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        places = range(len(self))[place]
        return (
            self._rank(places)
            if isinstance(places, int)
            else [*map(self._rank, places)]
        )

    def __iter__(self) -> Iterator[int]:
        return map(self._rank, range(len(self)))

    def place_of(self, rank: int) -> int | None:
        """Return the position of a rank, None where it is none of these."""
        rest, place = rank - self.start, 0
        for count, stride in self.axes:
            step = min(rest // stride, count - 1)
            rest -= step * stride
            place = place * count + step
        return place if rest == 0 and rank >= self.start else None

    def _rank(self, place: int) -> int:
        rank = self.start
        for count, stride in reversed(self.axes):
            place, step = divmod(place, count)
            rank += step * stride
        return rank


Holders = Ranks | RankGrid


def holders_of(ranks: Sequence[int]) -> Holders:
    """Return ascending ranks in the shortest form: a range, a grid, or a list."""
    axes: list[tuple[int, int]] = []
    firsts = np.asarray(ranks, dtype=np.int64)
    while len(firsts) > 1:
        steps = np.diff(firsts)
        other = np.flatnonzero(steps != steps[0])
        count = int(other[0]) + 1 if len(other) else len(firsts)
        if len(firsts) % count:
            return tuple(ranks)
        blocks = firsts.reshape(-1, count)
        if (blocks - blocks[:, :1] != blocks[0] - blocks[0, 0]).any():
            return tuple(ranks)
        axes.insert(0, (count, int(steps[0])))
        firsts = blocks[:, 0]
    if len(axes) <= 1:
        step = axes[0][1] if axes else 1
        return range(ranks[0], ranks[-1] + 1, step)
    return RankGrid(int(ranks[0]), tuple(axes))


def place_of(holders: Holders, rank: int) -> int | None:
    """Return the position of a rank among holders, None where it is none of them."""
    if isinstance(holders, RankGrid):
        return holders.place_of(rank)
    if isinstance(holders, range):
        return holders.index(rank) if rank in holders else None
    place = bisect_left(holders, rank)
    return place if holders[place : place + 1] == (rank,) else None
