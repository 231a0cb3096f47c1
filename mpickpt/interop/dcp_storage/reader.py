"""Loads through `torch.distributed.checkpoint` what mpickpt has saved, verified."""

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mpickpt.errors import CheckpointError, ManifestError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.records import ShardManifest
from mpickpt.format.tree import Plain, SavedLeaf
from mpickpt.interop.dcp_storage.boxes import read_boxes, read_tree
from mpickpt.interop.dcp_storage.reading import Reading
from mpickpt.interop.dcp_storage.tree import (
    METADATA_KEY,
    TENSOR,
    VALUE,
    Item,
    items_of,
    parse_marks,
)
from mpickpt.interop.dcp_storage.writer import require_all_ranks, require_threads
from mpickpt.interop.ties import TIED
from mpickpt.interop.torch.tensors import tensor_of
from mpickpt.parallel.communicators import conversations_of
from mpickpt.planning.tree_walk import leaves
from mpickpt.storage.array_reader import require_backed

Array = np.ndarray[Any, Any]


class DcpReader(StorageReader):
    """Read a checkpoint of mpickpt for `torch.distributed.checkpoint`.

    Parameters
    ----------
    path : path-like or URL
        The checkpoint; a ``checkpoint_id`` given to DCP replaces it.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks of DCP's process group; None is this process alone, without MPI.
    verify : {"sha256", "crc32", "none"}, optional
        As in `load_sharded`; where the program asks for a part of the checkpoint only,
        the blocks that hold it are verified by CRC-32.
    timeout_s : float, optional
        As in `load_sharded`.

    Notes
    -----
    Collective, as `DcpWriter`. Any number of ranks may load, with any placements.
    What DcpWriter saved is there under the names it had; in a checkpoint that
    `save_sharded` wrote, ``{"model": {"w": ...}}`` is "model.w", and what is `PerRank`
    is not there.

    Values that are not plain are read by torch with ``weights_only=True``; one that
    needs code to be run is refused by name.
    """

    def __init__(
        self,
        path: Any,
        comm: Any = None,
        *,
        verify: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.verify = verify
        self.timeout_s = timeout_s
        self._comm = comm
        self._manifest: ShardManifest | None = None
        self._items: dict[str, Item] = {}
        conversations_of(comm, timeout_s)

    @property
    def checkpoint_id(self) -> Any:
        """Where the checkpoint is; DCP's word for it."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this can be read from: a path or a URL."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a new load, of another checkpoint if one is given."""
        if checkpoint_id is not None:
            self.path = checkpoint_id
        self._manifest = None

    # DCP would ask for metadata of single ranks if this took keyword arguments.
    def read_metadata(self) -> Metadata:
        """Return what DCP's planner has to know of the checkpoint; collective."""
        require_threads(self._comm)
        manifest, tree = read_tree(self.path, self._comm, self.timeout_s)
        where = str(self.path)
        marks = parse_marks(manifest.metadata.get(METADATA_KEY), where=where)
        found = [_with_torch_dtype(item) for item in items_of(tree, marks)]
        items = found if METADATA_KEY in manifest.metadata else list(_untied(found))
        for item in items:
            _require_backed(item, manifest)
        self._items = {item.name: item for item in items}
        if len(self._items) < len(items):
            raise ManifestError(
                f"{where}: two entries have one name in DCP, as 'a.b' and 'b' in 'a' "
                "do; load it with load_sharded"
            )
        self._manifest = manifest
        return Metadata(
            state_dict_metadata={i.name: _item_metadata(i) for i in items},
            planner_data={item.name: item.path for item in items},
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.path),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Look whether the metadata was read."""
        if self._manifest is None:
            raise CheckpointError("DcpReader loads after its read_metadata() only")

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Find out whether the ranks together want all that was saved."""
        require_all_ranks(plans, self._comm, "DcpReader")
        wanted = {item.storage_index.fqn for plan in plans for item in plan.items}
        partial = any(
            _has_elements(item) and name not in wanted
            for name, item in self._items.items()
        )
        return [dataclasses.replace(plan, storage_data=partial) for plan in plans]

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Fill the tensors that the plan names, and give their values; collective."""
        assert self._manifest is not None
        reading = Reading(self._items, plan, planner)
        read_boxes(
            self.path,
            self._comm,
            reading.boxes,
            manifest=self._manifest,
            partial=bool(plan.storage_data),
            verify=self.verify,
            timeout_s=self.timeout_s,
        )
        reading.give()
        done = Future()
        done.set_result(None)
        return done


def _untied(items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items, aliases of tied parameters as what they stand for."""
    found = {item.path: item for item in items}
    for item in items:
        of = item.node.value if isinstance(item.node, Plain) else None
        tied = None
        if item.path[-1] == TIED and isinstance(of, str):
            tied = found.get((*item.path[:-2], of))
        yield Item(item.path[:-1], tied.kind, tied.node) if tied else item


def _require_backed(item: Item, manifest: ShardManifest) -> None:
    """Raise if an array claims more than the files hold; DCP may allocate it."""
    for _, leaf in leaves(item.node):
        if isinstance(leaf, SavedLeaf):
            nbytes = math.prod(leaf.shape) * parse_dtype(leaf.dtype).itemsize
            require_backed(leaf.key, nbytes, manifest.nbytes)


def _item_metadata(item: Item) -> Any:
    if item.kind != TENSOR or not isinstance(item.node, SavedLeaf):
        return BytesStorageMetadata()
    shape = torch.Size(item.node.shape)
    origin = torch.Size([0] * len(shape))
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_torch_dtype(item.node.dtype)),
        size=shape,
        chunks=[ChunkStorageMetadata(offsets=origin, sizes=shape)],
    )


def _with_torch_dtype(item: Item) -> Item:
    """Return the item, as a value that is numpy's where torch lacks the type."""
    if item.kind != TENSOR or not isinstance(item.node, SavedLeaf):
        return item
    try:
        _torch_dtype(item.node.dtype)
    except TypeError:
        return Item(item.path, VALUE, item.node)
    return item


@cache
def _torch_dtype(name: str) -> Any:
    return tensor_of(np.empty(0, parse_dtype(name))).dtype


def _has_elements(item: Item) -> bool:
    shapes: Sequence[tuple[int, ...]] = [
        leaf.shape for _, leaf in leaves(item.node) if isinstance(leaf, SavedLeaf)
    ]
    return any(math.prod(shape) for shape in shapes)
