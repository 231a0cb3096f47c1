"""Arranges the items of a DCP state as a tree, and finds them again; knows no torch.

DCP flattens a state into items with dotted names and remembers the path of each. It
goes into dicts, and into lists that hold tensors or dicts; every other value is one
item. The tree that is saved has the nested form, so the items can be found again by
the same rule; where a program's planner did otherwise, a mark in the manifest's
metadata says so.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from mpickpt.errors import ManifestError, StateTypeError
from mpickpt.format.naming import key_of
from mpickpt.format.tree import (
    DictNode,
    ListNode,
    LiveNode,
    Node,
    Plain,
    RecordNode,
    SavedLeaf,
    ScopeNode,
)
from mpickpt.planning.tree_walk import below, children, is_settled, leaves

ItemPath = tuple[str | int, ...]

METADATA_KEY = "dcp"
_VERSION = 1

TENSOR = "tensor"
VALUE = "value"
TORCH_SAVED = "torch_saved"


class Item(msgspec.Struct, frozen=True):
    """One entry of a flattened state.

    Attributes
    ----------
    path : tuple of str and int
        Keys of dicts and indices of lists that lead to it.
    kind : {"tensor", "value", "torch_saved"}
        "value" is a plain value, or a container of them; numpy arrays count as plain.
        "torch_saved" are the bytes of torch.save, kept as an array.
    node : Node
        What it is in the tree; arrays are `SavedLeaf`.
    """

    path: ItemPath
    kind: str
    node: Node

    @property
    def name(self) -> str:
        """The name that DCP gives it."""
        return name_of(self.path)


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tree alone does not tell what the items were, by key.

    Attributes
    ----------
    whole, split : tuple of str
        Containers that are one item, or several, against the rule.
    holes : tuple of str
        Places in lists where the program had an empty dict, which is no item.
    torch_saved : tuple of str
        Arrays that hold the bytes of torch.save.
    numpy : tuple of str
        Arrays that were numpy's, and no tensors.
    """

    version: int = _VERSION
    whole: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    holes: tuple[str, ...] = ()
    torch_saved: tuple[str, ...] = ()
    numpy: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the marks as JSON, without what is empty."""
        found = {name: list(getattr(self, name)) for name in _MARKED}
        return {"version": self.version} | {k: v for k, v in found.items() if v}


_MARKED = ("whole", "split", "holes", "torch_saved", "numpy")


def parse_marks(document: Any, *, where: str) -> Marks:
    """Return the marks that a manifest holds; none if it was not saved through DCP.

    Raises
    ------
    ManifestError
        They are of a newer version, or have another form.
    """
    if document is None:
        return Marks()
    try:
        marks = msgspec.convert(document, Marks)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{where}: metadata {METADATA_KEY!r}: {error}") from error
    if marks.version != _VERSION:
        raise ManifestError(
            f"{where}: metadata {METADATA_KEY!r} has version {marks.version}; this "
            f"version of mpickpt reads {_VERSION}, so install a newer one"
        )
    return marks


def name_of(path: ItemPath) -> str:
    """Return the name that DCP gives to the item at a path."""
    return ".".join(map(str, path))


def tree_of(items: Iterable[Item]) -> Node:
    """Return the tree that holds the items; list places without one hold None.

    Raises
    ------
    StateTypeError
        An item would lie inside another one, or beside indices of a list.
    """
    root = _Branch()
    for item in items:
        branch = root
        for component in item.path[:-1]:
            branch = _step(branch, component, item)
        if branch.setdefault(item.path[-1], item.node) is not item.node:
            raise _in_the_way(item)
    return _node_of(root)


def marks_of(tree: Node, items: Iterable[Item]) -> Marks:
    """Return what has to be said, so that `items_of` finds these items in the tree."""
    items = list(items)
    found = {item.path: item for item in items}
    branches = {item.path[:n] for item in items for n in range(len(item.path))}
    whole, split, holes = [], [], []

    def look(node: Node, path: ItemPath) -> None:
        if path in found:
            if _is_split(node) and not isinstance(node, SavedLeaf):
                whole.append(key_of(path))
        elif path in branches:
            if path and not _is_split(node):
                split.append(key_of(path))
            for component, child in children(node):
                assert component is not None
                look(child, (*path, component))
        elif path:
            holes.append(key_of(path))

    look(tree, ())
    arrays = [item for item in items if isinstance(item.node, SavedLeaf)]
    return Marks(
        whole=tuple(whole),
        split=tuple(split),
        holes=tuple(holes),
        torch_saved=tuple(key_of(i.path) for i in arrays if i.kind == TORCH_SAVED),
        numpy=tuple(key_of(i.path) for i in arrays if i.kind == VALUE),
    )


def items_of(tree: Node, marks: Marks) -> Iterator[Item]:
    """Yield the items of a saved tree.

    What differs between the ranks that saved it has no name in DCP and is left out.
    """
    return _Finder(marks).below(tree, (), "")


class _Finder:
    def __init__(self, marks: Marks) -> None:
        self.whole = frozenset(marks.whole)
        self.split = frozenset(marks.split)
        self.holes = frozenset(marks.holes)
        self.kinds = dict.fromkeys(marks.torch_saved, TORCH_SAVED)
        self.kinds |= dict.fromkeys(marks.numpy, VALUE)

    def below(self, node: Node, path: ItemPath, key: str) -> Iterator[Item]:
        """Yield the items in a container."""
        for component, child in children(node):
            if component is None:
                yield from self.at(child, path, key)
                continue
            # DCP makes text of the keys of dicts.
            step = component if isinstance(node, ListNode) else str(component)
            yield from self.at(child, (*path, step), below(key, component))

    def at(self, node: Node, path: ItemPath, key: str) -> Iterator[Item]:
        """Yield the item that a node is, or those in it."""
        if isinstance(node, ScopeNode | LiveNode):
            if not isinstance(node, ScopeNode) or node.wrapper != "per_rank":
                yield from self.at(node.child, path, key)
        elif isinstance(node, SavedLeaf):
            if node.kind != "per_rank":
                yield Item(path, self.kinds.get(key, TENSOR), node)
        elif not path or self.is_split(node, key):
            yield from self.below(node, path, key)
        elif key not in self.holes and _is_shared(node):
            yield Item(path, VALUE, node)

    def is_split(self, node: Node, key: str) -> bool:
        """Tell whether a node holds items, or is one."""
        return key not in self.whole and (key in self.split or _is_split(node))


def _is_split(node: Node) -> bool:
    """Tell whether DCP goes into a node: dicts, and lists with tensors or dicts."""
    if isinstance(node, ScopeNode | LiveNode):
        return _is_split(node.child)
    if isinstance(node, ListNode):
        return node.form == "list" and any(map(_is_split, node.items))
    return isinstance(node, DictNode | RecordNode | SavedLeaf)


def _is_shared(node: Node) -> bool:
    own = any(
        isinstance(n, SavedLeaf) and n.kind == "per_rank" for _, n in leaves(node)
    )
    return is_settled(node) and not own


class _Branch(dict[str | int, "Node | _Branch"]):
    """A container whose entries are still being put in."""


def _step(branch: _Branch, component: str | int, item: Item) -> _Branch:
    below = branch.setdefault(component, _Branch())
    if not isinstance(below, _Branch):
        raise _in_the_way(item)
    return below


def _node_of(branch: _Branch) -> Node:
    nodes: Mapping[str | int, Node] = {
        component: _node_of(node) if isinstance(node, _Branch) else node
        for component, node in branch.items()
    }
    indices = [component for component in nodes if isinstance(component, int)]
    if not indices:
        return DictNode(tuple(nodes.items()))
    if len(indices) != len(nodes):
        raise StateTypeError(
            f"the planner has keys {sorted(map(str, nodes))} in one container, which "
            "is neither a dict nor a list"
        )
    return ListNode(tuple(nodes.get(i, Plain(None)) for i in range(max(indices) + 1)))


def _in_the_way(item: Item) -> StateTypeError:
    return StateTypeError(
        f"{key_of(item.path)!r} lies inside another item, or is there twice; the "
        "planner's paths must lead to different places",
        key=key_of(item.path),
    )
