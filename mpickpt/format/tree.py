"""The nodes of a state tree; arrays are referred to by ordinal, or stand themselves."""

from typing import Any

import msgspec

MAX_DEPTH = 100  # walks of up to five frames a level fit under Python's limit of 1000

Key = str | int


class Node(msgspec.Struct, frozen=True):
    """A place in the tree."""


class Plain(Node, frozen=True, gc=False):
    """A plain Python value, or a numpy scalar."""

    value: Any


class ArrayNode(Node, frozen=True, gc=False):
    """An array: the ordinal of its record."""

    ordinal: int


class DictNode(Node, frozen=True):
    """A dict with str or int keys, in order."""

    items: tuple[tuple[Key, Node], ...]


class ListNode(Node, frozen=True):
    """A list, or a tuple where `form` is "tuple"."""

    items: tuple[Node, ...]
    form: str = "list"


class RecordNode(Node, frozen=True):
    """A dataclass or a namedtuple; `origin` is its class where it is known."""

    name: str
    items: tuple[tuple[Key, Node], ...]
    origin: Any = None


class ScopeNode(Node, frozen=True):
    """A wrapper around a subtree: "replicated" (check) or "per_rank" (on_resize)."""

    wrapper: str
    option: str
    child: Node
    rule: Any = None


class LiveNode(Node, frozen=True):
    """An object whose state was read; `origin` is the object where there is one."""

    name: str
    child: Node
    origin: Any = None


class AsSavedNode(Node, frozen=True):
    """Whatever was saved here; stands in templates only."""


class VariesNode(Node, frozen=True):
    """A value that differs between saved ranks; stands in merged trees only."""


class SavedLeaf(Node, frozen=True):
    """An array as it was saved; stands in place of `ArrayNode` once it is known.

    `shape` is the global shape; for a per-rank array that of one saved rank.
    """

    key: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    bare: bool = False
