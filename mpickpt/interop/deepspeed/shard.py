"""What the ranks of ZeRO have of the parameters, as a record; pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpickpt.interop.deepspeed.flat import Fragment, even_fragments, part_fragments
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.state import Shape

FP32 = "fp32"

Vectors = dict[int, StoredTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShard:
    """What the data-parallel ranks of one tensor-parallel rank have in all.

    Attributes
    ----------
    stage : int
        3, or 2 for stages 1 and 2, which lie alike.
    count : int
        Number of data-parallel ranks.
    shapes_by_group : tuple of dict of str to tuple of int
        Parameters of each vector, in its order.
    vectors : dict of str to list of dict of int to StoredTensor
        By state ("fp32", "exp_avg", ...), rank and group.
    scalars : list of dict of str to object
        Counts and the like, by group.
    groups : list of (dict, list of str)
        Settings of each parameter group, and names of its parameters.
    partitions : tuple of int
        Elements that each rank has of the vector of each group; stage 3: none.
    paddings : tuple of list of int
        Elements after each parameter that are nobody's.
    left_out : list of str
        States that are not of the parameters' elements.
    """

    stage: int
    count: int
    shapes_by_group: tuple[dict[str, Shape], ...]
    vectors: dict[str, list[Vectors]]
    scalars: list[dict[str, Any]]
    groups: list[tuple[dict[Any, Any], list[str]]]
    partitions: tuple[int, ...]
    paddings: tuple[list[int], ...]
    left_out: list[str]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each parameter."""
        return {n: s for shapes in self.shapes_by_group for n, s in shapes.items()}

    @property
    def group_of(self) -> dict[str, int]:
        """The vector in which the first element of each parameter is."""
        return {
            name: group
            for group, shapes in enumerate(self.shapes_by_group)
            for name in shapes
        }

    def fragments(self, dp: int) -> Iterator[Fragment]:
        """Yield what one rank has of the parameters."""
        if self.stage == 3:
            vectors = self.vectors[FP32][dp]
            lengths = [vectors[group].size for group in range(len(vectors))]
            yield from part_fragments(self.shapes_by_group, lengths, self.count, dp)
            return
        for group, shapes in enumerate(self.shapes_by_group):
            partition, paddings = self.partitions[group], self.paddings[group]
            yield from even_fragments(group, shapes, paddings, partition, dp)
