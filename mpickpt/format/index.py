"""The index of a shard: its tree, its arrays and where they lie; bytes in, bytes out.

The index makes a shard readable without the HDF5 library: a reader checks the
CRC-32 that the manifest gives for it, parses it, and finds every array by offset.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from mpickpt.errors import ManifestError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.format.naming import piece_name
from mpickpt.format.records import INT_MAX
from mpickpt.format.tree import Node
from mpickpt.format.tree_json import decode_tree, encode_tree

SCHEMA_VERSION = 1
KINDS = ("sharded", "replicated", "per_rank")


class StoredPart(msgspec.Struct, frozen=True, gc=False):
    """One box of an array that lies in this shard, C order, without gaps.

    `file_offset` is in bytes from the start of the shard; None where the box has no
    elements. `box` is in the index space of the global array.
    """

    file_offset: int | None
    box: Hyperslab


class IndexArray(msgspec.Struct, frozen=True, gc=False):
    """One array of the tree: what it is, what this rank held, what lies here.

    `shape` is the global shape; for a per-rank array, its own. `boxes` is what the
    rank held, `parts` is what it wrote: less, where a replica was written by another.
    """

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Hyperslab, ...]
    parts: tuple[StoredPart, ...]
    bare: bool = False


class ShardIndex(msgspec.Struct, frozen=True):
    """All that a reader must know of one shard.

    `table` is offset and length of the table of block CRC-32 values, in bytes.
    """

    rank: int
    world_size: int
    table: tuple[int, int]
    tree: Node
    arrays: tuple[IndexArray, ...]


def part_names(key: str, n_parts: int) -> list[str]:
    """Return the HDF5 path of each part of an array in one shard."""
    if n_parts == 1:
        return [key]
    return [f"{key}/{piece_name(i)}" for i in range(n_parts)]


def encode_arrays(arrays: Sequence[IndexArray]) -> msgspec.Raw:
    """Return the JSON of the array records, to be kept from save to save."""
    lines = [msgspec.json.encode(_array_document(array)) for array in arrays]
    body = b",\n".join(lines)
    return msgspec.Raw(b"[\n" + body + b"\n]" if lines else b"[]")


def encode_index_tree(tree: Node) -> msgspec.Raw:
    """Return the JSON of the state tree."""
    return msgspec.Raw(msgspec.json.encode(encode_tree(tree)))


def encode_index(
    arrays: msgspec.Raw,
    tree: msgspec.Raw,
    *,
    rank: int,
    world_size: int,
    table: Sequence[int],
) -> bytes:
    """Return the index as JSON, not yet padded."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "rank": rank,
        "world_size": world_size,
        "table": list(table),
        "arrays": arrays,
        "tree": tree,
    }
    return msgspec.json.encode(document)


def padded_nbytes(nbytes: int) -> int:
    """Return the length that an index of `nbytes` is padded to with spaces.

    A multiple of an eighth of the largest power of two in it, at least 1 KiB, so that
    a plain value which gains a digit hardly ever moves the arrays of the next save.
    """
    grain = max(1024, 1 << max(0, nbytes.bit_length() - 4))
    return -(-(nbytes + 1) // grain) * grain


def parse_index(text: bytes, *, nbytes: int, where: str) -> ShardIndex:
    """Return the index that a shard holds.

    Parameters
    ----------
    text : bytes
        The index; its CRC-32 has been checked.
    nbytes : int
        Length of the shard, in bytes: everything must lie inside.
    where : str
        The shard, for messages.

    Raises
    ------
    ManifestError
        Anything that this version's writer does not write.
    """
    try:
        document = msgspec.json.decode(text, type=_Document)
        index = _Reader(nbytes, where).index(document)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        if isinstance(error, ManifestError):
            raise
        raise ManifestError(
            f"{where}: the index of this shard cannot be read: {error}; the file was "
            "not written by mpickpt, or by a newer one"
        ) from error
    return index


def _array_document(array: IndexArray) -> dict[str, Any]:
    document: dict[str, Any] = {
        "key": array.key,
        "kind": array.kind,
        "dtype": array.dtype,
        "shape": array.shape,
        "parts": [[p.file_offset, p.box.offset, p.box.shape] for p in array.parts],
    }
    if array.boxes != (whole(array.shape),):
        document["boxes"] = [[box.offset, box.shape] for box in array.boxes]
    if array.bare:
        document["bare"] = True
    return document


class _ArrayDocument(msgspec.Struct):
    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    parts: list[tuple[int | None, tuple[int, ...], tuple[int, ...]]]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    bare: bool = False


class _Document(msgspec.Struct):
    schema_version: int
    rank: int
    world_size: int
    table: tuple[int, int]
    arrays: list[_ArrayDocument]
    tree: Any


class _Reader:
    """Turns a parsed index into records; every range is checked against the file."""

    def __init__(self, nbytes: int, where: str) -> None:
        self.nbytes = nbytes
        self.where = where

    def index(self, document: _Document) -> ShardIndex:
        if document.schema_version != SCHEMA_VERSION:
            raise ManifestError(
                f"{self.where}: index of schema {document.schema_version}; this "
                f"mpickpt reads {SCHEMA_VERSION}: upgrade it"
            )
        offset, length = document.table
        if not (offset >= 0 and length >= 0 and offset + length <= self.nbytes):
            raise self.refuse(f"a table at {offset}, {length} bytes")
        arrays = tuple(self.array(array) for array in document.arrays)
        if len({array.key for array in arrays}) != len(arrays):
            raise self.refuse("one key twice")
        tree = decode_tree(document.tree, len(arrays), where=self.where)
        return ShardIndex(
            document.rank, document.world_size, (offset, length), tree, arrays
        )

    def array(self, document: _ArrayDocument) -> IndexArray:
        if document.kind not in KINDS:
            raise self.refuse(f"kind {document.kind!r} of {document.key!r}")
        shape = document.shape
        if max(shape, default=0) > INT_MAX:
            raise self.refuse(f"the shape {shape} for {document.key!r}")
        itemsize = parse_dtype(document.dtype).itemsize
        parts = tuple(
            self.part(StoredPart(place, Hyperslab(offset, size)), shape, itemsize)
            for place, offset, size in document.parts
        )
        boxes = (
            (whole(shape),)
            if document.boxes is None
            else tuple(Hyperslab(*box) for box in document.boxes)
        )
        if not all(_inside(box, shape) for box in boxes):
            raise self.refuse(f"a box of {document.key!r} outside its shape {shape}")
        return IndexArray(
            document.key,
            document.kind,
            document.dtype,
            shape,
            boxes,
            parts,
            document.bare,
        )

    def part(self, part: StoredPart, shape: tuple[int, ...], itemsize: int) -> Any:
        length = part.box.size * itemsize if _inside(part.box, shape) else -1
        if length == 0 and part.file_offset is None:
            return part
        if (
            length <= 0
            or part.file_offset is None
            or not 0 <= part.file_offset <= self.nbytes - length
        ):
            raise self.refuse(
                f"a part at {part.file_offset} with box {part.box} of shape {shape}"
            )
        return part

    def refuse(self, what: str) -> ManifestError:
        return ManifestError(
            f"{self.where}: the index has {what}, but the file has {self.nbytes} "
            "bytes; it was not written by mpickpt, or by a newer one"
        )


def _inside(box: Hyperslab, shape: tuple[int, ...]) -> bool:
    if not len(box.offset) == len(box.shape) == len(shape):
        return False
    triples = zip(box.offset, box.shape, shape, strict=True)
    return all(start >= 0 and n >= 0 and start + n <= m for start, n, m in triples)
