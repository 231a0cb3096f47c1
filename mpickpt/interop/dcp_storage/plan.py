"""Turns what a DCP plan has a rank write into that rank's state tree; talks to nobody.

A plan names what this rank writes and nothing else. Every rank announces its items,
so that all have the same tree: then plain values are equal on all ranks, and any
number of ranks can load them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from torch.distributed.checkpoint.planner import WriteItemType

from mpickpt.errors import LayoutError
from mpickpt.format.dtypes import dtype_name, parse_dtype
from mpickpt.format.naming import key_of
from mpickpt.format.tree import ListNode, Node, SavedLeaf
from mpickpt.interop.dcp_storage.arrays import Arrays, Box, dtype_of, values_of
from mpickpt.interop.dcp_storage.tree import (
    TENSOR,
    TORCH_SAVED,
    VALUE,
    Item,
    ItemPath,
    Marks,
    marks_of,
    name_of,
    tree_of,
)
from mpickpt.planning.merge import pack_tree, unpack_tree
from mpickpt.planning.plain_values import plain_value
from mpickpt.state import Shape, Sharded


class Announced(msgspec.Struct, frozen=True):
    """What one rank tells the others of the items that it writes.

    Attributes
    ----------
    tensors : list of (path, dtype, global shape)
        Those whose first element it writes, so that one rank announces each.
    kinds : list of (path, kind)
        The other items.
    nodes : bytes
        Their nodes, packed in one list.
    """

    tensors: list[tuple[ItemPath, str, Shape]]
    kinds: list[tuple[ItemPath, str]]
    nodes: bytes


class Draft(msgspec.Struct, frozen=True):
    """What one rank writes: the boxes of its arrays by key, and what it announces."""

    boxes: dict[str, list[Box]]
    announced: Announced


class Described(msgspec.Struct, frozen=True):
    """The state tree of one rank, and what the manifest must say of it."""

    tree: Any
    marks: Marks


def draft(plan: Any, planner: Any) -> Draft:
    """Resolve the items of a plan.

    Parameters
    ----------
    plan : SavePlan
        The final plan of this rank.
    planner : SavePlanner
        Gives the data of its items.

    Raises
    ------
    StateTypeError, LayoutError
        An item that cannot be saved, by key.
    """
    drafting = _Drafting(plan, planner)
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            drafting.take_value(item)
        else:
            drafting.take_tensor(item)
    return drafting.draft()


class _Drafting:
    """Takes the items of a plan, one after the other."""

    def __init__(self, plan: Any, planner: Any) -> None:
        self._paths = _paths(plan)
        self._arrays = Arrays(planner)
        self._value_of = values_of(planner)
        self._boxes: defaultdict[str, list[Box]] = defaultdict(list)
        self._tensors: list[tuple[ItemPath, str, Shape]] = []
        self._kinds: list[tuple[ItemPath, str]] = []
        self._nodes: list[Node] = []

    def take_value(self, item: Any) -> None:
        """Take a byte item."""
        path = self._path(item)
        found = self._value_of(item, key_of(path))
        self._kinds.append((path, TORCH_SAVED if found.is_torch_saved else VALUE))
        self._nodes.append(found.node)
        for key, array in found.arrays.items():
            self._boxes[key].append(((0,) * array.ndim, array))

    def take_tensor(self, item: Any) -> None:
        """Take a tensor, or a box of one."""
        path = self._path(item)
        key = key_of(path)
        offset, shape = _box(item, key)
        self._boxes[key] += self._arrays.boxes(item, key)
        if not any(offset):
            self._tensors.append((path, dtype_name(dtype_of(item, key)), shape))

    def draft(self) -> Draft:
        """Return what was taken."""
        nodes = pack_tree(ListNode(tuple(self._nodes)))
        return Draft(dict(self._boxes), Announced(self._tensors, self._kinds, nodes))

    def _path(self, item: Any) -> ItemPath:
        name = item.index.fqn
        return self._paths.get(name, (name,))


def describe(own: Draft, announced: Iterable[Announced]) -> Described:
    """Return this rank's tree, which is the same on all ranks but for its boxes.

    Parameters
    ----------
    own : Draft
        What this rank writes.
    announced : iterable of Announced
        What all ranks have announced, in rank order.
    """
    items: dict[ItemPath, Item] = {}
    for rank in announced:
        for path, dtype, shape in rank.tensors:
            leaf = SavedLeaf(key_of(path), "sharded", dtype, shape)
            items[path] = Item(path, TENSOR, leaf)
        for (path, kind), node in zip(rank.kinds, _unpacked(rank.nodes), strict=True):
            items[path] = Item(path, kind, node)
    tree = tree_of(items.values())

    def boxes_of(leaf: SavedLeaf) -> Sharded:
        boxes = tuple(own.boxes.get(leaf.key, ()))
        return Sharded(None, leaf.shape, None, boxes, parse_dtype(leaf.dtype))

    return Described(plain_value(tree, boxes_of), marks_of(tree, items.values()))


def _unpacked(nodes: bytes) -> Sequence[Node]:
    listed = unpack_tree(nodes)
    assert isinstance(listed, ListNode)
    return listed.items


def _paths(plan: Any) -> Mapping[str, ItemPath]:
    """Return the paths that the default planner keeps; other planners' data differ."""
    paths = plan.planner_data
    if not isinstance(paths, Mapping):
        return {}
    return {
        name: path
        for name, path in paths.items()
        if isinstance(path, tuple) and path and name_of(path) == name
    }


def _box(item: Any, key: str) -> tuple[Shape, Shape]:
    """Return the offset of a tensor item, and the shape of the whole tensor."""
    if item.tensor_data is None or item.tensor_data.chunk is None:
        raise LayoutError(f"{key!r}: the planner does not say which box it is", key=key)
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.size)
