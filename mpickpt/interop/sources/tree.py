"""A foreign checkpoint as a tree of plain values and the places of its arrays; pure.

Rank 0 reads what describes the checkpoint and sends it to the others in this form;
each then reads a share of the items in the files, and no item is read twice.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from mpickpt.errors import ManifestError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.tree import ArrayNode, DictNode, Key, ListNode, Node, Plain
from mpickpt.format.tree_json import decode_tree
from mpickpt.state import Shape, Sharded

Path = tuple[Key, ...]
# Inner nodes while paths are put together; an int stands for a place in a list.
Branch = dict[Key, Any]


class SourceItem(msgspec.Struct, frozen=True, gc=False):
    """Where in the files something lies: a whole file of torch's, inside another.

    `file` is relative to the checkpoint; `start` and `nbytes` in bytes.
    """

    file: str
    start: int
    nbytes: int


class SourceRun(msgspec.Struct, frozen=True, gc=False):
    """A box of an array that is one run of a chunk's elements, from `start` on."""

    offset: Shape
    shape: Shape
    start: int


class SourceChunk(msgspec.Struct, frozen=True, gc=False):
    """A box of an array, and which array of which item holds its elements.

    With `runs`, offset and shape are only those of the item, and the runs say which
    boxes its elements are.
    """

    offset: Shape
    shape: Shape
    item: SourceItem
    ordinal: int = 0
    runs: tuple[SourceRun, ...] = ()


class SourceArray(msgspec.Struct, frozen=True):
    """An array of the checkpoint: name of its type, whole shape, and its boxes."""

    key: str
    dtype: str
    shape: Shape
    chunks: tuple[SourceChunk, ...]


class SourceTree(msgspec.Struct, frozen=True):
    """A checkpoint that is described in full.

    `directory` holds its files. `document` is the tree as JSON, whose arrays are
    ordinals in `arrays`; `step` is the step that it names, and `about` says in JSON
    where it came from. `digests` are size and SHA-256 of files that it has them for.
    """

    directory: str
    document: Any
    arrays: tuple[SourceArray, ...]
    step: int
    about: dict[str, Any]
    digests: dict[str, tuple[int, str]] = {}

    def dump(self) -> bytes:
        """Return it as bytes for the other ranks."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def parse(cls, content: bytes) -> "SourceTree":
        """Return what `dump` gave."""
        return msgspec.msgpack.decode(content, type=cls)

    def state(
        self,
        rank: int,
        size: int,
        pieces_of: Callable[[SourceArray, SourceChunk], list[tuple[Shape, Any]]],
    ) -> Any:
        """Return the state that one rank saves.

        Parameters
        ----------
        rank, size : int
            Which of how many ranks.
        pieces_of : callable
            Returns the boxes of a chunk that this rank reads, as (offset, elements).
        """
        items = {c.item: None for array in self.arrays for c in array.chunks}
        readers = share_out(items, size)
        leaves = []
        for array in self.arrays:
            own = [c for c in array.chunks if readers[c.item] == rank]
            pieces = [piece for chunk in own for piece in pieces_of(array, chunk)]
            dtype = parse_dtype(array.dtype)
            leaves.append(Sharded.pieces(pieces, global_shape=array.shape, dtype=dtype))
        tree = decode_tree(self.document, len(leaves), where="the source")
        return _value(tree, leaves)


def share_out(items: Iterable[SourceItem], size: int) -> dict[SourceItem, int]:
    """Return which rank reads each item: about as many bytes each, file after file."""
    in_order = sorted(items, key=lambda item: (item.file, item.start))
    total = sum(item.nbytes for item in in_order) or 1
    readers, before = {}, 0
    for item in in_order:
        middle = before + item.nbytes // 2
        readers[item] = min(size - 1, middle * size // total)
        before += item.nbytes
    return readers


def plant(root: Branch, path: Path, node: Node, *, where: str) -> None:
    """Put a node in its place below a branch.

    Raises
    ------
    ManifestError
        If something is there, or a value where a branch would be.
    """
    if not path:
        raise ManifestError(f"{where} has an entry without a name")
    branch = root
    for component in path[:-1]:
        branch = branch.setdefault(component, {})
        if not isinstance(branch, dict):
            break
    if not isinstance(branch, dict) or path[-1] in branch:
        raise ManifestError(
            f"{where} has two entries that cannot both be at {'.'.join(map(str, path))}"
        )
    branch[path[-1]] = node


def grown(branch: Branch, *, where: str) -> Node:
    """Return a branch as nodes: a list where all its keys are places in one."""
    children = [
        (key, grown(child, where=where) if isinstance(child, dict) else child)
        for key, child in branch.items()
    ]
    if not children or not any(type(key) is int for key in branch):
        return DictNode(tuple(children))
    by_place = dict(children)
    if set(by_place) != set(range(len(by_place))):
        raise ManifestError(
            f"{where} has a list with places {sorted(map(str, by_place))[:8]}, which "
            "does not count from 0 without a gap"
        )
    return ListNode(tuple(by_place[place] for place in range(len(by_place))))


def numbered(node: Node, first: int) -> Node:
    """Return a tree whose arrays are counted from another first ordinal."""
    if isinstance(node, ArrayNode):
        return ArrayNode(node.ordinal + first)
    if isinstance(node, DictNode):
        return DictNode(tuple((key, numbered(n, first)) for key, n in node.items))
    if isinstance(node, ListNode):
        return ListNode(tuple(numbered(n, first) for n in node.items), node.form)
    return node


def step_in(branch: Mapping[Key, Any], names: Iterable[str]) -> int:
    """Return the first of these entries that is a step number, else 0."""
    for name in names:
        node = branch.get(name)
        if isinstance(node, Plain) and type(node.value) is int and node.value >= 0:
            return node.value
    return 0


def _value(node: Node, leaves: list[Sharded]) -> Any:
    if isinstance(node, ArrayNode):
        return leaves[node.ordinal]
    if isinstance(node, DictNode):
        return {key: _value(child, leaves) for key, child in node.items}
    if isinstance(node, ListNode):
        items = [_value(child, leaves) for child in node.items]
        return tuple(items) if node.form == "tuple" else items
    assert isinstance(node, Plain)
    return node.value
