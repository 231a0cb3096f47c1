"""Stands in for the classes in the `.metadata` of a DCP checkpoint; touches nothing."""

from dataclasses import dataclass
from typing import Any

from mpickpt.interop.sources.allowlist import STANDARD, Allowlist
from mpickpt.interop.sources.stubs import Enumeration, Opaque, Stub

_ALWAYS_THERE = {"state_dict_metadata", "planner_data", "storage_data"}


@dataclass(frozen=True)
class Metadata(Stub):
    """Stands for `Metadata`, and for what Megatron calls `MCoreMetadata`."""

    state_dict_metadata: Any = None
    planner_data: Any = None
    storage_data: Any = None
    version: Any = None
    mcore_data: Any = None

    def set_state(self, state: Any) -> None:
        """Take the fields."""
        # All versions write these, if only as None; a damaged name would be dropped.
        if not isinstance(state, dict) or not state.keys() >= _ALWAYS_THERE:
            raise TypeError(f"metadata without one of {sorted(_ALWAYS_THERE)}")
        super().set_state(state)


@dataclass(frozen=True)
class TensorStorage(Stub):
    """Stands for `TensorStorageMetadata`."""

    properties: Any = None
    size: Any = None
    chunks: Any = None


@dataclass(frozen=True)
class TensorProperties(Stub):
    """Stands for `TensorProperties`, of which only the type is used."""

    dtype: Any = None

    def set_state(self, state: Any) -> None:
        """Take the fields."""
        if type(state) is not tuple or len(state) != 5:
            raise TypeError("properties of a tensor in an unknown form")
        object.__setattr__(self, "dtype", state[0])


@dataclass(frozen=True)
class BytesStorage(Stub):
    """Stands for `BytesStorageMetadata`."""


@dataclass(frozen=True)
class Chunk(Stub):
    """Stands for `ChunkStorageMetadata`."""

    offsets: Any = None
    sizes: Any = None


@dataclass(frozen=True)
class Index(Stub):
    """Stands for `MetadataIndex`, the key of an item."""

    fqn: Any = None
    offset: Any = None
    index: Any = None

    def as_key(self) -> tuple[Any, ...]:
        """Return name and offset; of what is no tensor name and None."""
        if self.offset is None:
            return (self.fqn, None)
        return (self.fqn, *self.offset)


@dataclass(frozen=True)
class StorageInfo(Stub):
    """Stands for `_StorageInfo`."""

    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None


_CLASSES = {
    "BytesStorageMetadata": BytesStorage,
    "ChunkStorageMetadata": Chunk,
    "Metadata": Metadata,
    "MetadataIndex": Index,
    "StorageMeta": Opaque,
    "TensorProperties": TensorProperties,
    "TensorStorageMetadata": TensorStorage,
    "_MEM_FORMAT_ENCODING": Enumeration(Opaque.made),
}
# Plans that Megatron keeps beside the metadata; nothing is taken from them.
_PLANS = {
    "BytesIOWriteData": Opaque,
    "SavePlan": Opaque,
    "TensorWriteData": Opaque,
    "WriteItem": Opaque,
    "WriteItemType": Opaque.made,
}


def _allowed() -> Allowlist:
    names = dict(STANDARD)
    # The second is where they were before torch 2.1.
    for package in (
        "torch.distributed.checkpoint",
        "torch.distributed._shard.checkpoint",
    ):
        names |= {(f"{package}.metadata", name): cls for name, cls in _CLASSES.items()}
        names |= {(f"{package}.planner", name): cls for name, cls in _PLANS.items()}
        names[f"{package}.filesystem", "_StorageInfo"] = StorageInfo
    shard = "torch.distributed._shard.sharded_tensor.metadata"
    megatron = "megatron.core.dist_checkpointing.strategies.torch"
    return names | {
        (shard, "TensorProperties"): TensorProperties,
        (shard, "MEM_FORMAT_ENCODING"): Enumeration(Opaque.made),
        (megatron, "MCoreMetadata"): Metadata,
        (megatron, "MCoreSavePlan"): Opaque,
        ("pathlib", "PosixPath"): Opaque.made,
        ("pathlib._local", "PosixPath"): Opaque.made,
    }


METADATA_ALLOWLIST = _allowed()
