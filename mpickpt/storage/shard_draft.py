"""Turns one rank's flattened state into a shard ready to be streamed; no disk.

The image of the HDF5 file, which takes HDF5 to make, depends on the layout alone and
is kept from save to save.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from mpickpt.format.dtypes import dtype_name
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.index import (
    IndexArray,
    StoredPart,
    encode_arrays,
    encode_index,
    encode_index_tree,
    padded_nbytes,
    part_names,
)
from mpickpt.format.tree import Node
from mpickpt.state import StreamedArray
from mpickpt.storage.shard_image import PartSpec, ShardImage, build_image

Array = np.ndarray[Any, Any] | StreamedArray

_WIDEST_TABLE = (2**53, 2**53)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArray:
    """One array as a rank holds it and as it is going to be stored.

    Attributes
    ----------
    key, kind, dtype, bare
        As in `IndexArray`; `dtype` is numpy's.
    shape : tuple of int
        Global shape; for a per-rank array its own.
    boxes : tuple of Hyperslab
        What the rank holds.
    parts : tuple of (int, Hyperslab)
        What it writes: the number of the box, and the part of it, both in the index
        space of the global array.
    """

    key: str
    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    boxes: tuple[Hyperslab, ...]
    parts: tuple[tuple[int, Hyperslab], ...]
    bare: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """What a shard keeps from save to save while its arrays stay as they are.

    Attributes
    ----------
    arrays : tuple of DraftArray
        The arrays that it was made for.
    image : ShardImage
        The HDF5 file without its arrays.
    records : msgspec.Raw
        JSON of the array records of the index.
    """

    arrays: tuple[DraftArray, ...]
    image: ShardImage
    records: msgspec.Raw


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDraft:
    """A shard ready to be streamed: its image, its index, and the arrays."""

    layout: ShardLayout
    index: bytes
    parts: tuple[Array, ...]


def draft_shard(
    tree: Node,
    arrays: tuple[DraftArray, ...],
    held: Sequence[Sequence[Array]],
    *,
    rank: int,
    world_size: int,
    known: ShardLayout | None,
) -> ShardDraft:
    """Return one rank's shard.

    Parameters
    ----------
    tree : Node
        The state tree, whose ordinals name the arrays.
    arrays : tuple of DraftArray
        Descriptions, in the order in which the arrays shall lie in the file; the very
        tuple of `known` where they are the same.
    held : sequence of sequences of array
        For each description, the array of each of its boxes.
    rank, world_size : int
        Written to the index.
    known : ShardLayout or None
        That of an earlier save; used where it fits.
    """
    encoded_tree = encode_index_tree(tree)

    def encoded(records: msgspec.Raw, table: Sequence[int]) -> bytes:
        return encode_index(
            records, encoded_tree, rank=rank, world_size=world_size, table=table
        )

    layout = known
    if layout is None or layout.arrays is not arrays:
        layout = _lay_out(arrays, encoded)
    index = _padded(layout, encoded)
    if index is None:
        layout = _lay_out(arrays, encoded)
        index = _padded(layout, encoded)
    assert index is not None
    return ShardDraft(layout=layout, index=index, parts=tuple(_views(arrays, held)))


def _lay_out(
    arrays: tuple[DraftArray, ...],
    encoded: Callable[[msgspec.Raw, Sequence[int]], bytes],
) -> ShardLayout:
    known: dict[tuple[int | None, ...], msgspec.Raw] = {}

    def records(offsets: tuple[int | None, ...]) -> msgspec.Raw:
        if offsets not in known:
            known[offsets] = _records(arrays, offsets)
        return known[offsets]

    def index_length(offsets: tuple[int | None, ...]) -> int:
        return padded_nbytes(len(encoded(records(offsets), _WIDEST_TABLE)))

    image = build_image(_specs(arrays), index_length)
    return ShardLayout(arrays=arrays, image=image, records=records(image.part_offsets))


def _padded(
    layout: ShardLayout, encoded: Callable[[msgspec.Raw, Sequence[int]], bytes]
) -> bytes | None:
    """Return the index at the length that the image has for it, or None."""
    image = layout.image
    index = encoded(layout.records, (image.table_offset, image.table_nbytes))
    widest = encoded(layout.records, _WIDEST_TABLE)
    if padded_nbytes(len(widest)) != image.index_nbytes:
        return None
    return index.ljust(image.index_nbytes)


def _specs(arrays: Sequence[DraftArray]) -> list[PartSpec]:
    return [
        PartSpec(name=name, dtype=array.dtype, shape=part.shape)
        for array in arrays
        for name, (_, part) in zip(
            part_names(array.key, len(array.parts)), array.parts, strict=True
        )
    ]


def _records(
    arrays: Sequence[DraftArray], offsets: Sequence[int | None]
) -> msgspec.Raw:
    places = iter(offsets)
    return encode_arrays(
        [
            IndexArray(
                array.key,
                array.kind,
                dtype_name(array.dtype),
                array.shape,
                array.boxes,
                tuple(StoredPart(next(places), part) for _, part in array.parts),
                array.bare,
            )
            for array in arrays
        ]
    )


def _views(
    arrays: Sequence[DraftArray], held: Sequence[Sequence[Array]]
) -> list[Array]:
    views = []
    for array, boxes in zip(arrays, held, strict=True):
        for number, part in array.parts:
            box, whole = array.boxes[number], boxes[number]
            if part is not box and part != box:
                whole = whole[part.relative_to(box).slices()]
            views.append(whole)
    return views
