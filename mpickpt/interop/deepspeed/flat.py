"""Finds parameters in the flat vectors that ZeRO splits over ranks; pure arithmetic."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpickpt.interop.sources.flat_range import boxes_of_flat_range
from mpickpt.state import Shape


@dataclass(frozen=True, slots=True)
class Fragment:
    """A run of elements of one parameter that one rank has in one of its vectors.

    Attributes
    ----------
    name : str
        The parameter.
    group : int
        Which of the rank's vectors.
    start : int
        First element in the flattened parameter.
    local_start : int
        First element in the vector.
    length : int
        Number of elements.
    """

    name: str
    group: int
    start: int
    local_start: int
    length: int

    def boxes(self, shape: Shape) -> Iterator[tuple[Shape, Shape, int]]:
        """Yield offset and shape of boxes of the parameter, and their first element.

        The element is counted in the vector.
        """
        stop = self.start + self.length
        for box, first in boxes_of_flat_range(shape, self.start, stop):
            yield box.offset, box.shape, self.local_start + first - self.start


def even_fragments(
    group: int,
    shapes: dict[str, Shape],
    paddings: Sequence[int],
    partition: int,
    rank: int,
) -> Iterator[Fragment]:
    """Yield what a rank of ZeRO 1 or 2 has: its part of the one vector of a group.

    Parameters
    ----------
    group : int
        The parameter group.
    shapes : dict of str to tuple of int
        Its parameters, in the order of the vector.
    paddings : sequence of int
        Elements after each parameter that are nobody's.
    partition : int
        Elements that each rank has.
    rank : int
        Data-parallel rank.
    """
    first, last = rank * partition, (rank + 1) * partition
    at = 0
    for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
        stop = at + math.prod(shape)
        low, high = max(at, first), min(stop, last)
        if low < high:
            yield Fragment(name, group, low - at, low - first, high - low)
        at = stop + padding


def part_fragments(
    groups: Sequence[dict[str, Shape]], lengths: Sequence[int], count: int, rank: int
) -> Iterator[Fragment]:
    """Yield what a rank of ZeRO 3 has: its part of every parameter, one after another.

    Parameters
    ----------
    groups : sequence of dict of str to tuple of int
        Parameters of each sub-group, in the order of the vectors.
    lengths : sequence of int
        Elements of each of the rank's vectors; a part may begin in one and end in
        the next.
    count : int
        Number of ranks.
    rank : int
        Data-parallel rank.
    """
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    at, group = 0, 0
    for shapes in groups:
        for name, shape in shapes.items():
            numel = math.prod(shape)
            part = -(-numel // count)
            start = min(rank * part, numel)
            stop = min(start + part, numel)
            local = at
            while start < stop:
                while starts[group + 1] <= local:
                    group += 1
                length = min(stop - start, starts[group + 1] - local)
                yield Fragment(name, group, start, local - starts[group], length)
                start, local = start + length, local + length
            at += part


def parts_numel(groups: Sequence[dict[str, Shape]], count: int) -> int:
    """Return how many elements each rank of ZeRO 3 has, padding included."""
    return sum(
        -(-math.prod(shape) // count) for shapes in groups for shape in shapes.values()
    )


def padded_numel(shapes: dict[str, Shape], paddings: Sequence[int]) -> int:
    """Return how many elements the vector of a group has, but for those at its end."""
    return sum(map(math.prod, shapes.values())) + sum(paddings)
