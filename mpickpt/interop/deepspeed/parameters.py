"""What an optimizer of DeepSpeed has for each parameter, whatever way it was split."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpickpt.interop.deepspeed.shard import ZeroShard
from mpickpt.interop.deepspeed.tensor_parallel import TensorParallelLayout
from mpickpt.interop.sources.reading import Pieces, SourceReading
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.state import Shape


@dataclass(slots=True)
class Split:
    """An array that lies in boxes: its type, and those boxes that this rank reads."""

    dtype: np.dtype[Any]
    pieces: Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters that an optimizer trains.

    Attributes
    ----------
    shapes : dict of str to tuple of int
        Shape of each, whole.
    arrays : dict of str to dict of str to Split
        By state ("fp32", "exp_avg", ...) and parameter.
    scalars : dict of str to dict of str to object
        Counts and the like, by parameter and state.
    groups : list of (dict, list of str)
        Settings of each parameter group, and the names of its parameters.
    left_out : list of str
        What could not be brought to parameters.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    arrays: dict[str, dict[str, Split]] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[tuple[dict[Any, Any], list[str]]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def keep_own(self, reading: SourceReading) -> None:
        """Drop the boxes that other ranks read."""
        for splits in self.arrays.values():
            for split in splits.values():
                split.pieces = [p for p in split.pieces if reading.owns(p[1])]


def parameters_of(
    shards: Sequence[ZeroShard], layout: TensorParallelLayout, reading: SourceReading
) -> Parameters:
    """Return the parameters that ZeRO has split over ranks.

    Parameters
    ----------
    shards : sequence of ZeroShard
        One for each tensor-parallel rank.
    layout : TensorParallelLayout
        Where their parts of a parameter lie in the whole.
    reading : SourceReading
        Says what this rank reads.
    """
    first = shards[0]
    shapes = {name: layout.shape(name) for name in first.shapes}
    arrays: dict[str, dict[str, Split]] = defaultdict(dict)
    for state, vectors in first.vectors.items():
        for name, group in first.group_of.items():
            if group in vectors[0]:
                arrays[state][name] = Split(vectors[0][group].dtype, [])
    for tp, shard in enumerate(shards):
        for dp in range(shard.count):
            _add_pieces(arrays, shard, dp, tp, layout, reading)
    return Parameters(
        shapes=shapes,
        arrays=arrays,
        scalars={name: first.scalars[group] for name, group in first.group_of.items()},
        groups=first.groups,
        left_out=[name for shard in shards for name in shard.left_out],
    )


def _add_pieces(
    arrays: dict[str, dict[str, Split]],
    shard: ZeroShard,
    dp: int,
    tp: int,
    layout: TensorParallelLayout,
    reading: SourceReading,
) -> None:
    own = [
        (arrays[state], _own(vectors[dp], reading))
        for state, vectors in shard.vectors.items()
    ]
    own = [(by_name, tensors) for by_name, tensors in own if tensors]
    if not own:
        return
    shapes = shard.shapes
    for fragment in shard.fragments(dp):
        corner = layout.corner(fragment.name, tp)
        if corner is None:
            continue
        boxes = [
            (tuple(a + b for a, b in zip(corner, offset, strict=True)), shape, first)
            for offset, shape, first in fragment.boxes(shapes[fragment.name])
        ]
        for by_name, tensors in own:
            tensor = tensors.get(fragment.group)
            if tensor is not None:
                by_name[fragment.name].pieces += [
                    (offset, tensor.run(first, shape)) for offset, shape, first in boxes
                ]


def _own(
    tensors: dict[int, StoredTensor], reading: SourceReading
) -> dict[int, StoredTensor]:
    return {group: t for group, t in tensors.items() if reading.owns(t)}
