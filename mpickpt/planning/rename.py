"""Moves entries of a saved tree to other keys; pure functions."""

from collections.abc import Mapping

import msgspec

from mpickpt.errors import LayoutError
from mpickpt.format.naming import Path, key_from_user, key_of, parse_key
from mpickpt.format.tree import DictNode, Key, Node, RecordNode, ScopeNode

Mapped = DictNode | RecordNode


def renamed(tree: Node, rename: Mapping[str, str]) -> Node:
    """Return the tree with each entry at an old key moved to its new one.

    Parameters
    ----------
    tree : Node
        As saved.
    rename : mapping of str to str
        Old key to new key, of an entry or of a whole subtree; "/" at the end is
        allowed. An old key that is not in the tree is passed over. A subtree joins
        what is at its new key.

    Raises
    ------
    LayoutError
        Something else was saved at a new key; nothing is dropped without a word.
    """
    moved = []
    for old, new in rename.items():
        tree, node = _taken(tree, user_path(old), None)
        if node is not None:
            moved.append((user_path(new), node))
    for path, node in moved:
        tree = _put(tree, path, node, ())
    return tree


def user_path(text: str) -> Path:
    """Return the path that a person typed."""
    return parse_key(key_from_user(text))


def _taken(tree: Node, path: Path, scope: ScopeNode | None) -> tuple[Node, Node | None]:
    """Return the tree without the node at a path, and the node in its wrapper."""
    if isinstance(tree, ScopeNode):
        child, node = _taken(tree.child, path, tree)
        return msgspec.structs.replace(tree, child=child), node
    if not isinstance(tree, Mapped) or not path:
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


def _put(tree: Node | None, path: Path, node: Node, place: Path) -> Node:
    """Return the tree with a node added at a path; `place` is where the tree is."""
    if isinstance(tree, ScopeNode):
        if isinstance(node, ScopeNode) and node.wrapper == tree.wrapper:
            node = node.child  # the wrapper of its new place is around it
        child = _put(tree.child, path, node, place)
        return msgspec.structs.replace(tree, child=child)
    if not path:
        return _joined(tree, node, place)
    if tree is not None and not isinstance(tree, Mapped):
        raise _taken_already(place)
    items: dict[Key, Node] = {} if tree is None else dict(tree.items)
    here = (*place, path[0])
    items[path[0]] = _put(items.get(path[0]), path[1:], node, here)
    return DictNode(tuple(items.items()))


def _joined(tree: Node | None, node: Node, place: Path) -> Node:
    if tree is None:
        return node
    if not isinstance(tree, Mapped) or not isinstance(node, Mapped):
        raise _taken_already(place)
    joined: Node = tree
    for key, child in node.items:
        joined = _put(joined, (key,), child, place)
    return joined


def _taken_already(place: Path) -> LayoutError:
    key = key_of(place)
    return LayoutError(
        f"{key!r}: rename moves another entry there, but it was saved itself; rename "
        "that one too, or choose another new key",
        key=key,
    )


def _is_empty(node: Node) -> bool:
    while isinstance(node, ScopeNode):
        node = node.child
    return isinstance(node, Mapped) and not node.items
