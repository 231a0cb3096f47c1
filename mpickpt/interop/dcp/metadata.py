"""Parses the `.metadata` of a `torch.distributed.checkpoint`; pure, no torch.

The file has no checksum of its own, so whatever it says twice must agree, and what it
says of a tensor must agree with the item that holds it.
"""

import math
from dataclasses import dataclass
from typing import Any

from mpickpt.errors import ManifestError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.format.tree import Key
from mpickpt.interop.dcp.stubs import (
    METADATA_ALLOWLIST,
    BytesStorage,
    Chunk,
    Metadata,
    StorageInfo,
    TensorProperties,
    TensorStorage,
)
from mpickpt.interop.sources.restricted_unpickler import loads
from mpickpt.interop.sources.stubs import TorchDtype
from mpickpt.interop.sources.tree import SourceChunk, SourceItem
from mpickpt.state import Shape

METADATA_NAME = ".metadata"
MOST_NBYTES = 256 << 20

_VERSIONS = (None, "1.0.0")
_MOST = 1 << 62
_MOST_CHARACTERS = 512
_MOST_PARTS = 64
_TRUE_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensorEntry:
    """A tensor of the checkpoint: its type, whole shape and boxes."""

    dtype: str
    shape: Shape
    chunks: tuple[SourceChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpListing:
    """What a checkpoint holds, by the flat names that DCP gave.

    Attributes
    ----------
    tensors : dict
        Tensors by name.
    values : dict
        Where everything else is, by name.
    paths : dict
        Path in the state of each name that has one.
    reshaped : dict
        True shape of tensors that Megatron flattened and stored in another.
    """

    tensors: dict[str, StoredTensorEntry]
    values: dict[str, SourceItem]
    paths: dict[str, tuple[Key, ...]]
    reshaped: dict[str, Shape]


def parse_metadata(content: bytes, *, where: str) -> DcpListing:
    """Return what a `.metadata` lists.

    Raises
    ------
    ManifestError
        If it is damaged, says things that do not fit together, is of an unknown
        version, or asks for a global that metadata does not need.
    """
    found = loads(
        content, allow=METADATA_ALLOWLIST, where=where, max_nbytes=MOST_NBYTES
    )
    if not isinstance(found, Metadata):
        raise ManifestError(f"{where} holds no metadata of a DCP checkpoint")
    if found.version not in _VERSIONS:
        raise ManifestError(
            f"{where} is of a version other than {_VERSIONS[-1]!r}, the one known here"
        )
    return _Parser(found, where).listing()


def _is_text(value: Any) -> bool:
    # A lone surrogate is legal in Python, and in nothing that is told to others.
    if type(value) is not str:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _length(part: Key) -> int:
    return len(part if isinstance(part, str) else str(part))


class _Parser:
    def __init__(self, found: Metadata, where: str) -> None:
        self.where = where
        self.entries = self.mapping(found.state_dict_metadata, "state_dict_metadata")
        self.stored = dict(self.mapping(found.storage_data, "storage_data"))
        self.planned = self.mapping(found.planner_data or {}, "planner_data")
        self.mcore = found.mcore_data

    def listing(self) -> DcpListing:
        tensors: dict[str, StoredTensorEntry] = {}
        values: dict[str, SourceItem] = {}
        for name, entry in self.entries.items():
            if not _is_text(name):
                raise self.wrong("a name that is no text")
            if isinstance(entry, TensorStorage):
                tensors[name] = self.tensor(name, entry)
            elif isinstance(entry, BytesStorage):
                values[name] = self.item((name, None))
            else:
                raise self.wrong(f"{name!r} as a {type(entry).__name__}")
        if self.stored:
            raise self.wrong(f"items of nothing: {list(self.stored)[:3]}")
        paths = {name: self.path(name) for name in self.entries}
        return DcpListing(
            tensors=tensors, values=values, paths=paths, reshaped=self.reshaped()
        )

    def tensor(self, name: str, entry: TensorStorage) -> StoredTensorEntry:
        properties = entry.properties
        if not isinstance(properties, TensorProperties) or not isinstance(
            properties.dtype, TorchDtype
        ):
            raise self.wrong(f"{name!r} without a dtype")
        shape = self.lengths(entry.size, name)
        if type(entry.chunks) is not list or not entry.chunks:
            raise self.wrong(f"{name!r} without chunks")
        boxes: dict[tuple[Shape, Shape], None] = {}
        for chunk in entry.chunks:
            if not isinstance(chunk, Chunk):
                raise self.wrong(f"{name!r} with a {type(chunk).__name__} as a chunk")
            offset = self.lengths(chunk.offsets, name)
            # Replicas of old versions are listed as often as there were ranks.
            boxes[offset, self.lengths(chunk.sizes, name)] = None
        chunks = tuple(self.chunk(name, shape, *box) for box in boxes)
        itemsize = parse_dtype(properties.dtype.dtype_name).itemsize
        for chunk in chunks:
            nbytes = math.prod(chunk.shape) * itemsize
            if nbytes > chunk.item.nbytes:  # tensors are not compressed
                raise self.wrong(
                    f"{name!r} with a chunk of {nbytes} bytes in an item of "
                    f"{chunk.item.nbytes}"
                )
        return StoredTensorEntry(
            dtype=properties.dtype.dtype_name, shape=shape, chunks=chunks
        )

    def chunk(
        self, name: str, whole_shape: Shape, offset: Shape, shape: Shape
    ) -> SourceChunk:
        if not len(whole_shape) == len(offset) == len(shape) or not whole(
            whole_shape
        ).contains(Hyperslab(offset, shape)):
            raise self.wrong(
                f"{name!r} of shape {whole_shape} with a chunk of shape {shape} at "
                f"{offset}, which does not lie inside"
            )
        return SourceChunk(offset, shape, self.item((name, *offset)))

    def item(self, key: tuple[Any, ...]) -> SourceItem:
        info = self.stored.pop(key, None)
        if not isinstance(info, StorageInfo):
            raise self.wrong(f"no place in the files for {key}")
        if info.transform_descriptors:
            raise ManifestError(
                f"{self.where}: {key[0]!r} was written through a transform, as of "
                "compression; save the checkpoint anew without extensions"
            )
        numbers = (info.offset, info.length)
        path = info.relative_path
        if (
            not _is_text(path)
            or len(path) > _MOST_CHARACTERS
            or not all(
                type(number) is int and 0 <= number < _MOST for number in numbers
            )
        ):
            raise self.wrong(f"{key} at a place that is none")
        return SourceItem(path, info.offset, info.length)

    def path(self, name: str) -> tuple[Key, ...]:
        if not self.planned:  # Megatron's planner keeps none
            return (name,)
        path = self.planned.get(name)
        if (
            type(path) is not tuple
            or len(path) > _MOST_PARTS
            or not all(type(part) in (str, int) for part in path)
        ):
            raise self.wrong(f"{name!r} with a path that is none")
        # Its length first: a path can be long parts, named over and over.
        if sum(_length(part) + 1 for part in path) != len(name) + 1 or name != ".".join(
            map(str, path)
        ):
            raise self.wrong(f"{name!r} with a path to another name")
        return path

    def reshaped(self) -> dict[str, Shape]:
        shapes = {}
        for name, facts in self.mapping(self.mcore or {}, "mcore_data").items():
            shape = self.mapping(facts, "facts").get(_TRUE_SHAPE)
            if shape is not None and name in self.entries:
                shapes[name] = self.lengths(shape, name)
        return shapes

    def lengths(self, numbers: Any, name: str) -> Shape:
        if type(numbers) is not tuple or not all(
            type(number) is int and 0 <= number < _MOST for number in numbers
        ):
            raise self.wrong(f"{name!r} with a shape that is none")
        return numbers

    def mapping(self, found: Any, name: str) -> dict[Any, Any]:
        if not isinstance(found, dict):
            raise self.wrong(f"no {name}")
        return found

    def wrong(self, what: str) -> ManifestError:
        return ManifestError(f"{self.where} is damaged or not of DCP: it has {what}")
