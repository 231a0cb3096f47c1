"""Merges the trees of several saved ranks into one; pure functions.

A load on another number of ranks sees one tree: the union of what the saved ranks
had. Where their plain values differ, a `VariesNode` stands; what lies inside
`PerRank` is told apart by digest alone, since it is nearly always different.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from mpickpt.errors import ManifestError
from mpickpt.format.index import ShardIndex
from mpickpt.format.naming import key_of
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
from mpickpt.format.tree_json import decode_tree, encode_tree
from mpickpt.planning.tree_walk import below, leaves, transform


def saved_tree(index: ShardIndex) -> Node:
    """Return the tree of one shard with its array records in place of ordinals.

    Raises
    ------
    ManifestError
        An array stands in another place of the tree than its key says.
    """
    for key, node in leaves(index.tree):
        if isinstance(node, ArrayNode):
            found = index.arrays[node.ordinal].key
            if found != (key or key_of(())):
                raise ManifestError(
                    f"the tree of a shard has the array {found!r} at {key!r}; it was "
                    "not written by mpickpt"
                )

    def leaf(node: Node) -> Node:
        if isinstance(node, SavedLeaf | VariesNode):
            raise ManifestError("a shard's tree has a node that only messages have")
        if not isinstance(node, ArrayNode):
            return node
        array = index.arrays[node.ordinal]
        return SavedLeaf(array.key, array.kind, array.dtype, array.shape, array.bare)

    return transform(index.tree, leaf)


def skeleton(node: Node, key: str = "") -> tuple[Node, dict[str, str]]:
    """Return the tree without what `PerRank` holds, and the digest of each of these.

    Returns
    -------
    node : Node
        The tree with a `VariesNode` in each per-rank wrapper.
    digests : dict of str to str
        Key of the wrapper, SHA-256 of its encoded child.
    """
    digests: dict[str, str] = {}

    def strip(node: Node, key: str) -> Node:
        if isinstance(node, ScopeNode) and node.wrapper == "per_rank":
            digests[key] = digest_of(node.child)
            return ScopeNode(node.wrapper, node.option, VariesNode())
        if isinstance(node, DictNode | RecordNode):
            items = tuple((c, strip(n, below(key, c))) for c, n in node.items)
            return msgspec.structs.replace(node, items=items)
        if isinstance(node, ListNode):
            numbered = enumerate(node.items)
            return ListNode(
                tuple(strip(n, below(key, i)) for i, n in numbered), node.form
            )
        if isinstance(node, ScopeNode | LiveNode):
            return msgspec.structs.replace(node, child=strip(node.child, key))
        return node

    return strip(node, key), digests


def merge(trees: Sequence[Node]) -> Node:
    """Return the union of several skeletons; values that differ become `VariesNode`."""
    merged = trees[0]
    for tree in trees[1:]:
        merged = _merge(merged, tree)
    return merged


def overlay(own: Node, union: Node) -> Node:
    """Return the union with what one of the merged trees has in place of it."""
    if isinstance(own, DictNode | RecordNode) and isinstance(union, type(own)):
        theirs = dict(union.items)
        items = {k: overlay(n, theirs.pop(k, n)) for k, n in own.items}
        return msgspec.structs.replace(own, items=tuple((items | theirs).items()))
    if isinstance(own, ListNode) and isinstance(union, ListNode) and _alike(own, union):
        pairs = zip(own.items, union.items, strict=True)
        return ListNode(tuple(overlay(x, y) for x, y in pairs), own.form)
    if (
        isinstance(own, ScopeNode)
        and isinstance(union, ScopeNode)
        and own.wrapper == union.wrapper == "replicated"
    ):
        return msgspec.structs.replace(own, child=overlay(own.child, union.child))
    return own


def digest_of(node: Node) -> str:
    """Return the SHA-256 of a tree, 64 hex digits."""
    return hashlib.sha256(pack_tree(node)).hexdigest()


def pack_tree(node: Node) -> bytes:
    """Return a tree as bytes for other ranks."""
    return msgspec.json.encode(encode_tree(node))


def unpack_tree(packed: bytes) -> Node:
    """Return the tree that `pack_tree` packed."""
    return decode_tree(msgspec.json.decode(packed), None, where="another rank")


def _merge(a: Node, b: Node) -> Node:
    if isinstance(a, Plain | SavedLeaf | VariesNode):
        # Not a == b: True equals 1 and nan differs from itself.
        return a if pack_tree(a) == pack_tree(b) else VariesNode()
    if isinstance(a, DictNode) and isinstance(b, DictNode):
        return DictNode(_merge_items(dict(a.items), dict(b.items)))
    if isinstance(a, RecordNode) and isinstance(b, RecordNode) and a.name == b.name:
        return RecordNode(a.name, _merge_items(dict(a.items), dict(b.items)))
    if isinstance(a, ListNode) and isinstance(b, ListNode) and _alike(a, b):
        pairs = zip(a.items, b.items, strict=True)
        return ListNode(tuple(_merge(x, y) for x, y in pairs), a.form)
    if isinstance(a, ScopeNode) and isinstance(b, ScopeNode) and a.wrapper == b.wrapper:
        return ScopeNode(a.wrapper, a.option, _merge(a.child, b.child))
    if isinstance(a, LiveNode) and isinstance(b, LiveNode) and a.name == b.name:
        return LiveNode(a.name, _merge(a.child, b.child))
    return VariesNode()


def _merge_items(
    a: Mapping[Key, Node], b: Mapping[Key, Node]
) -> tuple[tuple[Key, Node], ...]:
    merged = {
        key: _merge(node, b[key]) if key in b else node for key, node in a.items()
    }
    return tuple((merged | {k: n for k, n in b.items() if k not in a}).items())


def _alike(a: ListNode, b: ListNode) -> bool:
    return a.form == b.form and len(a.items) == len(b.items)
