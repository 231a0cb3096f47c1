"""Moves entries of a saved tree to other keys; pure functions."""

from collections.abc import Mapping

import msgspec

from mpickpt.format.naming import Path, key_from_user, parse_key
from mpickpt.format.tree import DictNode, Key, Node, RecordNode, ScopeNode


def renamed(tree: Node, rename: Mapping[str, str]) -> Node:
    """Return the tree with each entry at an old key moved to its new one.

    Parameters
    ----------
    tree : Node
        As saved.
    rename : mapping of str to str
        Old key to new key, of an entry or of a whole subtree; "/" at the end is
        allowed. An old key that is not in the tree is passed over.
    """
    moved = []
    for old, new in rename.items():
        tree, node = _taken(tree, user_path(old), None)
        if node is not None:
            moved.append((user_path(new), node))
    for path, node in moved:
        tree = _put(tree, path, node)
    return tree


def user_path(text: str) -> Path:
    """Return the path that a person typed."""
    return parse_key(key_from_user(text))


def _taken(tree: Node, path: Path, scope: ScopeNode | None) -> tuple[Node, Node | None]:
    """Return the tree without the node at a path, and the node in its wrapper."""
    if isinstance(tree, ScopeNode):
        child, node = _taken(tree.child, path, tree)
        return msgspec.structs.replace(tree, child=child), node
    if not isinstance(tree, DictNode | RecordNode) or not path:
        return tree, None
    items = dict(tree.items)
    below = items.get(path[0])
    if below is None:
        return tree, None
    if len(path) == 1:
        del items[path[0]]
        found = msgspec.structs.replace(scope, child=below) if scope else below
        return msgspec.structs.replace(tree, items=tuple(items.items())), found
    rest, node = _taken(below, path[1:], scope)
    items[path[0]] = rest
    if node is not None and _is_empty(rest):
        del items[path[0]]  # its last entry was taken
    return msgspec.structs.replace(tree, items=tuple(items.items())), node


def _put(tree: Node, path: Path, node: Node) -> Node:
    if not path:
        return node
    if isinstance(tree, ScopeNode):
        if isinstance(node, ScopeNode) and node.wrapper == tree.wrapper:
            node = node.child  # the wrapper of its new place is around it
        return msgspec.structs.replace(tree, child=_put(tree.child, path, node))
    items: dict[Key, Node] = {}
    if isinstance(tree, DictNode | RecordNode):
        items = dict(tree.items)
    items[path[0]] = _put(items.get(path[0], DictNode(())), path[1:], node)
    return DictNode(tuple(items.items()))


def _is_empty(node: Node) -> bool:
    while isinstance(node, ScopeNode):
        node = node.child
    return isinstance(node, DictNode | RecordNode) and not node.items
