"""Turns saved trees into plain Python containers; pure functions, no I/O, no MPI."""

from collections.abc import Callable, Iterable
from typing import Any

from mpickpt.errors import ManifestError
from mpickpt.format.naming import Path as KeyPath
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
    VariesNode,
)
from mpickpt.planning.tree_walk import children

LeafValue = Callable[[SavedLeaf], Any]


def plain_value(
    node: Node,
    leaf_value: LeafValue,
    child_value: Callable[[Node, KeyPath], Any] | None = None,
    path: KeyPath = (),
) -> Any:
    """Return a tree as dicts, lists and tuples; wrappers and classes are left out.

    Parameters
    ----------
    node : Node
        Tree of one rank, or a merged one.
    leaf_value : callable
        Gives the value of an array leaf.
    child_value : callable, optional
        Gives the value of a child at a path; by default this function does.
    path : tuple
        Path of the node, for `child_value`.
    """

    def default(node: Node, path: KeyPath) -> Any:
        return plain_value(node, leaf_value, None, path)

    below = child_value or default
    if isinstance(node, Plain):
        return node.value
    if isinstance(node, SavedLeaf):
        return leaf_value(node)
    if isinstance(node, DictNode | RecordNode):
        return {key: below(child, (*path, key)) for key, child in node.items}
    if isinstance(node, ListNode):
        items = [below(child, (*path, i)) for i, child in enumerate(node.items)]
        return tuple(items) if node.form == "tuple" else items
    if isinstance(node, ScopeNode | LiveNode):
        return below(node.child, path)
    raise ManifestError(f"{key_of(path)!r} has no value of its own")


def is_by_rank(node: Node) -> bool:
    """Tell whether each rank has a value of its own at a node of a merged tree."""
    if isinstance(node, ScopeNode):
        return node.wrapper == "per_rank"
    if isinstance(node, LiveNode):
        return any(map(is_by_rank, _all_below(node)))
    if isinstance(node, SavedLeaf):
        return node.kind == "per_rank"
    return isinstance(node, VariesNode)


def leaf_paths(node: Node, path: KeyPath = ()) -> Iterable[KeyPath]:
    """Yield the path of every leaf; what each rank has for its own is one leaf."""
    below = () if is_by_rank(node) else tuple(children(node))
    if not below:
        yield path
    for component, child in below:
        yield from leaf_paths(child, _joined(path, component))


def paths_by_rank(node: Node, path: KeyPath) -> Iterable[KeyPath]:
    """Yield the paths of the topmost nodes at which each rank has its own value."""
    if is_by_rank(node):
        yield path
        return
    for component, child in children(node):
        yield from paths_by_rank(child, _joined(path, component))


def _joined(path: KeyPath, component: str | int | None) -> KeyPath:
    return path if component is None else (*path, component)


def _all_below(node: Node) -> Iterable[Node]:
    for _, child in children(node):
        yield child
        yield from _all_below(child)
