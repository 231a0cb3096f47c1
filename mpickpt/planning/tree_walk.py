"""Walks over the nodes of a state tree; pure functions."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from mpickpt.format.naming import escape_component
from mpickpt.format.tree import (
    ArrayNode,
    DictNode,
    Key,
    ListNode,
    LiveNode,
    Node,
    Plain,
    RecordNode,
    SavedLeaf,
    ScopeNode,
    VariesNode,
)

Path = tuple[Key, ...]


def transform(node: Node, change: Callable[[Node], Node]) -> Node:
    """Return the tree with `change` applied to every leaf."""
    if isinstance(node, DictNode | RecordNode):
        items = tuple((key, transform(child, change)) for key, child in node.items)
        return msgspec.structs.replace(node, items=items)
    if isinstance(node, ListNode):
        return ListNode(tuple(transform(n, change) for n in node.items), node.form)
    if isinstance(node, ScopeNode | LiveNode):
        return msgspec.structs.replace(node, child=transform(node.child, change))
    return change(node)


def children(node: Node) -> Iterator[tuple[Key | None, Node]]:
    """Yield the children of a node with the component that leads to each.

    The component is None below a wrapper or a live object: they add none to the path.
    """
    if isinstance(node, DictNode | RecordNode):
        yield from node.items
    elif isinstance(node, ListNode):
        yield from enumerate(node.items)
    elif isinstance(node, ScopeNode | LiveNode):
        yield None, node.child


def leaves(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """Yield (key, leaf) for every leaf of a tree, in order."""
    inner = False
    for component, child in children(node):
        inner = True
        yield from leaves(child, below(key, component))
    if not inner:
        yield key, node


def below(key: str, component: Key | None) -> str:
    """Return the key of a child."""
    if component is None:
        return key
    return (key + "/" if key else "") + escape_component(component)


def find(node: Node | None, path: Path) -> Node | None:
    """Return the node at a path, seen through wrappers, or None."""
    for component in path:
        while isinstance(node, ScopeNode | LiveNode):
            node = node.child
        if node is None:
            return None
        node = next((n for c, n in children(node) if c == component), None)
    return node


def plain_only(node: Node) -> bool:
    """Tell whether a tree holds nothing but plain values in dicts, lists and tuples."""
    kinds: tuple[Any, ...] = (Plain, DictNode, ListNode, RecordNode)
    return isinstance(node, kinds) and all(plain_only(n) for _, n in children(node))


def is_settled(saved: Node) -> bool:
    """Tell whether a merged tree holds no value that differs between saved ranks."""
    return not any(isinstance(leaf, VariesNode) for _, leaf in leaves(saved))


def described(node: Node) -> str:
    """Return a node in words, for a message."""
    if isinstance(node, Plain):
        return f"a plain {type(node.value).__name__}"
    if isinstance(node, SavedLeaf | ArrayNode):
        return "an array"
    if isinstance(node, ListNode):
        return f"a {node.form} of {len(node.items)}"
    if not isinstance(node, DictNode | RecordNode):
        return "an object"
    if len(node.items) == 1 and isinstance(only := node.items[0][1], Plain):
        return f"a dict, {{{node.items[0][0]!r}: {only.value!r:.60}}}"
    return f"a dict of {len(node.items)}"
