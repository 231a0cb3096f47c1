"""The boxes that lie in a shard, who takes their bytes, and how they are verified."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpickpt.format.digest import shard_blocks
from mpickpt.format.dtypes import dtype_name, parse_dtype
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.index import IndexArray, StoredPart
from mpickpt.storage.checks import BlockCrc32, Check, NoCheck, Span, WholeFileSha256
from mpickpt.storage.delivery import (
    Delivery,
    InBoxes,
    Placed,
    placing,
    target_of,
)
from mpickpt.storage.shard_reader import ShardReader

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """A box of an array in a shard that this rank reads."""

    reader: ShardReader
    array: IndexArray
    part: StoredPart

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the stored elements."""
        return parse_dtype(self.array.dtype)

    @property
    def source(self) -> int | None:
        """Saved rank, for a per-rank array."""
        return self.reader.record.rank if self.array.kind == "per_rank" else None

    def placed(self, target: Any) -> Placed:
        """Return the bytes of the box with who takes them."""
        assert self.part.file_offset is not None
        nbytes = self.part.box.size * self.dtype.itemsize
        return Placed(offset=self.part.file_offset, nbytes=nbytes, target=target)

    def filling(self, array: Array, box: Hyperslab) -> Placed:
        """Return the bytes of the box, going to the array that holds `box`."""
        inside = box.contains(self.part.box)
        if inside and dtype_name(array.dtype) == self.array.dtype:
            view = array[self.part.box.relative_to(box).slices()]
            return self.placed(target_of(view))
        return self.placed(InBoxes(self.part.box, self.dtype, placing(array, box)))


def stored_boxes(readers: Sequence[ShardReader]) -> list[StoredBox]:
    """Return every box with elements that lies in these shards."""
    return [
        StoredBox(reader=reader, array=array, part=part)
        for reader in readers
        for array in reader.index.arrays
        for part in array.parts
        if part.file_offset is not None
    ]


def spans_and_check(
    reader: ShardReader, delivery: Delivery, verify: str, *, partial: bool
) -> tuple[Sequence[Span], Check]:
    """Return what to read of a shard, and how that is verified.

    Parameters
    ----------
    reader : ShardReader
        The shard; its index is verified.
    delivery : Delivery
        Who wants which bytes.
    verify : {"sha256", "crc32", "none"}
        The whole file by SHA-256; or its blocks by CRC-32; or just the bytes that
        are wanted, by nothing.
    partial : bool
        Of the blocks, those alone that hold what is wanted.
    """
    record = reader.record
    if verify == "sha256":
        return [(0, record.nbytes)], WholeFileSha256(record.sha256)
    if verify == "none":
        return delivery.spans(), NoCheck()
    table_offset, table_nbytes = reader.index.table
    table = struct.pack(f"<{len(reader.table)}I", *reader.table)
    check = BlockCrc32(table_offset, table)
    if not partial:
        return [(0, record.nbytes)], check
    blocks = shard_blocks(table_offset, table_nbytes, record.nbytes)
    return _touched(blocks, delivery.spans()), check


def _touched(blocks: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Return the blocks that hold a byte of the spans; both ascend."""
    touched, number = [], 0
    for start, stop in blocks:
        while number < len(spans) and spans[number][1] <= start:
            number += 1
        if number < len(spans) and spans[number][0] < stop:
            touched.append((start, stop))
    return touched
