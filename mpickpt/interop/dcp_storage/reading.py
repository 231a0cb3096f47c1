"""Reads by a DCP load plan: into the program's memory, or beside it; no MPI here."""

import io
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import LoadItemType

from mpickpt.errors import LayoutError, ManifestError, StateTypeError
from mpickpt.format.dtypes import dtype_name, parse_dtype
from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.format.tree import SavedLeaf
from mpickpt.interop.dcp_storage.tree import TORCH_SAVED, Item
from mpickpt.interop.dcp_storage.values import load_torch_saved, reason_of
from mpickpt.interop.torch.tensors import array_of, tensor_of
from mpickpt.planning.plain_values import plain_value
from mpickpt.planning.tree_walk import leaves

Array = np.ndarray[Any, Any]


class Reading:
    """What one rank reads by one plan: first the arrays, then all is given.

    Parameters
    ----------
    items : dict of str to Item
        What was saved, by its name in DCP.
    plan : LoadPlan
        The final plan of this rank.
    planner : LoadPlanner
        Takes what is read.
    """

    def __init__(self, items: dict[str, Item], plan: Any, planner: Any) -> None:
        self.items = items
        self.plan = plan
        self.planner = planner
        self.tensors: list[tuple[Any, Any]] = []
        self.copies: list[tuple[Any, Array]] = []
        self.arrays: dict[str, Array] = {}

    def boxes(self) -> dict[str, list[tuple[Hyperslab, Array]]]:
        """Return what is to be read, by key."""
        boxes: defaultdict[str, list[tuple[Hyperslab, Array]]] = defaultdict(list)
        for request in self.plan.items:
            item = self.items[request.storage_index.fqn]
            if request.type == LoadItemType.TENSOR:
                assert isinstance(item.node, SavedLeaf)
                boxes[item.node.key].append(self.tensor_box(request, item.node))
                continue
            for _, leaf in leaves(item.node):
                if isinstance(leaf, SavedLeaf) and leaf.key not in self.arrays:
                    array = np.empty(leaf.shape, parse_dtype(leaf.dtype))
                    self.arrays[leaf.key] = array
                    boxes[leaf.key].append((whole(leaf.shape), array))
        return boxes

    def tensor_box(self, request: Any, leaf: SavedLeaf) -> tuple[Hyperslab, Array]:
        """Return a box and the program's own memory, or some to be copied from."""
        target = self.planner.resolve_tensor(request).detach()
        box = Hyperslab(tuple(request.storage_offsets), tuple(request.lengths))
        if tuple(target.shape) != box.shape:
            raise LayoutError(
                f"{leaf.key!r}: the plan reads a box of shape {box.shape} into a "
                f"tensor of shape {tuple(target.shape)}",
                key=leaf.key,
            )
        array = _own_memory(target, leaf.dtype)
        if array is None:
            array = np.empty(box.shape, parse_dtype(leaf.dtype))
            self.copies.append((target, array))
        self.tensors.append((request, target))
        return box, array

    def give(self) -> None:
        """Give the planner what was read."""
        for target, array in self.copies:
            target.copy_(tensor_of(array))
        for request, target in self.tensors:
            self.planner.commit_tensor(request, target)
        for request in self.plan.items:
            if request.type == LoadItemType.BYTE_IO:
                item = self.items[request.storage_index.fqn]
                self.planner.load_bytes(request, self.saved_value(item))

    def saved_value(self, item: Item) -> io.BytesIO:
        """Return bytes of torch.save, made here, for a planner that unpickles them."""
        value = plain_value(item.node, lambda leaf: self.arrays[leaf.key])
        if item.kind == TORCH_SAVED:
            value = _loaded(item.name, value)
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return buffer


def _own_memory(target: Any, dtype: str) -> Array | None:
    """Return the memory of a tensor, if saved elements can be read right into it."""
    if target.device.type != "cpu":
        return None
    try:
        array = array_of(target, "target")
    except StateTypeError:  # torch may know how to copy into it
        return None
    fits = array.flags.writeable and dtype_name(array.dtype) == dtype
    return array if fits else None


def _loaded(name: str, saved: Array) -> Any:
    try:
        return load_torch_saved(saved.tobytes())
    except Exception as error:
        raise ManifestError(
            f"{name!r} holds what torch cannot read back without running code, which "
            f"mpickpt never does: {reason_of(error)}"
        ) from error
