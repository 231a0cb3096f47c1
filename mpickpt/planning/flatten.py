"""Flattens a live state into nodes and a list of array leaves; no I/O, no MPI."""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from mpickpt.errors import LayoutError, StateTypeError
from mpickpt.format.dtypes import check_dtype
from mpickpt.format.naming import escape_component
from mpickpt.format.tree import (
    MAX_DEPTH,
    ArrayNode,
    AsSavedNode,
    DictNode,
    Key,
    ListNode,
    LiveNode,
    Node,
    Plain,
    RecordNode,
    ScopeNode,
)
from mpickpt.planning.live import is_generator, live_state, record_fields
from mpickpt.state import (
    ArraySpec,
    AsSaved,
    PerRank,
    Replicated,
    Shape,
    Sharded,
    StreamedArray,
)

Array = np.ndarray[Any, Any]
Wrapper = Sharded | Replicated | PerRank

_INT64_MAX = 2**63 - 1
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_HINT = (
    "say whose it is: Sharded(x, global_shape=..., offset=...) for this rank's box of "
    "a global array, Replicated(x) where all ranks have the same, PerRank(x) for this "
    "rank's own"
)


class HeldLeaf(msgspec.Struct, frozen=True, gc=False):
    """One array of the state as this rank holds it.

    `boxes` are (offset, array) pairs in the index space of the global array;
    `global_shape` is None for consecutive blocks, whose place is agreed at save, and
    for per-rank arrays. In a template an array may be an `ArraySpec`.
    """

    key: str
    kind: str
    dtype: Any
    global_shape: Shape | None
    boxes: tuple[tuple[Shape, Any], ...]
    check: str = "off"
    bare: bool = False


class FlatState(msgspec.Struct, frozen=True):
    """A state as a tree of nodes and the leaves that its ordinals name.

    `replicated_plain` are the plain values inside `Replicated`, by key.
    """

    tree: Node
    leaves: tuple[HeldLeaf, ...]
    replicated_plain: dict[str, Plain] = {}


def flatten(state: Any, *, alone: bool, template: bool = False) -> FlatState:
    """Return the state as nodes and leaves.

    Parameters
    ----------
    state : tree
        As described in `mpickpt.state`.
    alone : bool
        One rank: bare arrays are let through, as replicated ones.
    template : bool
        The tree is a `like`: `AsSaved` and specs are let through.

    Raises
    ------
    StateTypeError
        A value that cannot be saved, or a bare array; names the key.
    LayoutError
        An offset or shape that does not fit its array.
    """
    walk = _Walk(alone=alone, template=template)
    tree = walk.node(state, "", None, 0)
    return FlatState(tree, tuple(walk.leaves), walk.replicated_plain)


class _Walk:
    def __init__(self, *, alone: bool, template: bool) -> None:
        self.alone = alone
        self.template = template
        self.leaves: list[HeldLeaf] = []
        self.replicated_plain: dict[str, Plain] = {}
        self.known_dtypes: set[np.dtype[Any]] = set()

    def node(self, value: Any, key: str, scope: Wrapper | None, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise StateTypeError(
                f"{shown(key)!r} is nested deeper than {MAX_DEPTH}; does the state "
                "contain itself?",
                key=shown(key),
            )
        kind = type(value)
        if kind in _PLAIN:
            return self.plain(value, key, scope)
        if isinstance(value, np.ndarray | ArraySpec | StreamedArray):
            return self.array(value, key, scope)
        if isinstance(value, Sharded | Replicated | PerRank):
            return self.wrapped(value, key, scope, depth)
        return self.container(value, key, scope, depth)

    def container(
        self, value: Any, key: str, scope: Wrapper | None, depth: int
    ) -> Node:
        if isinstance(value, dict):
            return DictNode(self.items(value.items(), key, scope, depth))
        if type(value) in (list, tuple):
            pairs = self.items(enumerate(value), key, scope, depth)
            form = type(value).__name__
            return ListNode(tuple(child for _, child in pairs), form)
        if isinstance(value, np.generic):
            self.require_dtype(np.asarray(value).dtype, key)
            return self.plain(value, key, scope)
        if value is AsSaved or isinstance(value, AsSaved):
            return self.as_saved(key)
        fields = record_fields(value)
        if fields is not None:
            pairs = self.items(fields, key, scope, depth)
            return RecordNode(type(value).__qualname__, pairs, type(value))
        return self.live(value, key, scope, depth)

    def plain(self, value: Any, key: str, scope: Wrapper | None) -> Plain:
        leaf = Plain(value)
        if isinstance(scope, Replicated):
            self.replicated_plain[shown(key)] = leaf
        return leaf

    def items(
        self,
        pairs: Iterable[tuple[Any, Any]],
        key: str,
        scope: Wrapper | None,
        depth: int,
    ) -> tuple[tuple[Key, Node], ...]:
        prefix = key + "/" if key else ""
        nodes = []
        for name, child in pairs:
            if type(name) is not str and type(name) is not int:
                raise StateTypeError(
                    f"{shown(key)!r} has the dict key {name!r} of type "
                    f"{type(name).__name__}; keys are str or int",
                    key=shown(key),
                )
            try:
                place = prefix + escape_component(name)
            except ValueError as error:  # Python writes no int of 4,301 digits
                raise StateTypeError(
                    f"{shown(key)!r} has a dict key that cannot be written: {error}",
                    key=shown(key),
                ) from error
            nodes.append((name, self.node(child, place, scope, depth + 1)))
        return tuple(nodes)

    def wrapped(
        self, value: Wrapper, key: str, scope: Wrapper | None, depth: int
    ) -> Node:
        if scope is not None:
            raise StateTypeError(
                f"{shown(key)!r} is {type(value).__name__} inside "
                f"{type(scope).__name__}; wrap it once",
                key=shown(key),
            )
        if isinstance(value, Sharded):
            if value.boxes is not None:
                return self.pieces(value, key)
            self.require_array(value.data, key)
            return self.node(value.data, key, value, depth + 1)
        child = self.node(value.data, key, value, depth + 1)
        if isinstance(value, Replicated):
            return ScopeNode("replicated", value.check, child)
        rule = value.on_resize
        return ScopeNode("per_rank", "error" if callable(rule) else rule, child, rule)

    def require_array(self, value: Any, key: str) -> None:
        # Plain values beside arrays in a subtree are this rank's own; alone they
        # would be that without a word.
        item = value[0] if isinstance(value, list | tuple) and value else value
        if type(item) in _PLAIN or isinstance(item, np.generic):
            raise StateTypeError(
                f"{shown(key)!r} is Sharded, but holds a {type(value).__name__} and no "
                "array; make it one with numpy.asarray",
                key=shown(key),
            )

    def live(self, value: Any, key: str, scope: Wrapper | None, depth: int) -> Node:
        state = live_state(value, template=self.template)
        if state is None:
            raise StateTypeError(
                f"{shown(key)!r} is a {type(value).__module__}."
                f"{type(value).__qualname__}, which cannot be saved. Saved are arrays, "
                "None, bool, int, float, complex, str, bytes, list, tuple, dict, "
                "dataclasses, random generators, and objects with state_dict() and "
                "load_state_dict(); nothing is ever pickled",
                key=shown(key),
            )
        if scope is None and is_generator(value):
            scope = PerRank(None)
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return LiveNode(name, self.node(state, key, scope, depth + 1), value)

    def as_saved(self, key: str) -> Node:
        if not self.template:
            raise StateTypeError(
                f"{shown(key)!r} is AsSaved, which stands in `like` trees only",
                key=shown(key),
            )
        return AsSavedNode()

    def array(self, array: Any, key: str, scope: Wrapper | None) -> Node:
        if isinstance(array, ArraySpec):
            if not self.template:
                raise StateTypeError(
                    f"{shown(key)!r} is Sharded.spec(...), which stands in `like` "
                    "trees only",
                    key=shown(key),
                )
            array = ArraySpec(array.shape, np.dtype(array.dtype))
        self.require_fillable(array, key)
        if isinstance(array, np.ma.MaskedArray):
            raise StateTypeError(
                f"{shown(key)!r} is a masked array; save its data and its mask as two",
                key=shown(key),
            )
        self.require_dtype(array.dtype, key)
        if isinstance(scope, Sharded):
            return self.leaf(self.sharded(array, key, scope))
        if isinstance(scope, PerRank):
            return self.leaf(_whole(key, "per_rank", array))
        if isinstance(scope, Replicated):
            return self.leaf(_whole(key, "replicated", array, scope.check))
        if self.alone:
            return self.leaf(_whole(key, "replicated", array, bare=True))
        raise StateTypeError(f"{shown(key)!r} is a bare array: {_HINT}", key=shown(key))

    def sharded(self, array: Any, key: str, scope: Sharded) -> HeldLeaf:
        if scope.consecutive:
            if len(array.shape) == 0:
                raise LayoutError(
                    f"{shown(key)!r} is Sharded.block of a 0-d array, which has no "
                    "axis 0 to be split along; give it shape (1,), or use Replicated",
                    key=shown(key),
                )
            boxes = (((0,) * len(array.shape), array),)
            return HeldLeaf(key, "sharded", array.dtype, None, boxes)
        assert scope.global_shape is not None and scope.offset is not None
        require_inside(key, array.shape, scope.global_shape, scope.offset)
        boxes = ((scope.offset, array),)
        return HeldLeaf(key, "sharded", array.dtype, scope.global_shape, boxes)

    def pieces(self, value: Sharded, key: str) -> Node:
        assert value.boxes is not None and value.global_shape is not None
        dtype = None if value.dtype is None else np.dtype(value.dtype)
        nowhere = (0,) * len(value.global_shape)
        require_inside(key, nowhere, value.global_shape, nowhere)
        for offset, array in value.boxes:
            if not isinstance(array, np.ndarray | ArraySpec | StreamedArray):
                raise StateTypeError(
                    f"{shown(key)!r} has a piece of type {type(array).__name__}; "
                    "pieces are (offset, array) pairs",
                    key=shown(key),
                )
            self.require_fillable(array, key)
            self.require_dtype(np.dtype(array.dtype), key)
            require_inside(key, array.shape, value.global_shape, offset)
            if dtype is not None and np.dtype(array.dtype) != dtype:
                raise LayoutError(
                    f"{shown(key)!r} has pieces of dtype {dtype} and {array.dtype}; "
                    "all pieces of one array have one dtype",
                    key=shown(key),
                )
            dtype = np.dtype(array.dtype)
        if dtype is not None:
            self.require_dtype(dtype, key)
        return self.leaf(
            HeldLeaf(key, "sharded", dtype, value.global_shape, value.boxes)
        )

    def leaf(self, leaf: HeldLeaf) -> ArrayNode:
        if not leaf.key:
            leaf = msgspec.structs.replace(leaf, key="%root")
        self.leaves.append(leaf)
        return ArrayNode(len(self.leaves) - 1)

    def require_fillable(self, array: Any, key: str) -> None:
        if self.template and isinstance(array, StreamedArray):
            raise StateTypeError(
                f"{shown(key)!r} is a {type(array).__qualname__}, which only gives "
                "elements; a load fills arrays, so put one there, or AsSaved",
                key=shown(key),
            )

    def require_dtype(self, dtype: np.dtype[Any], key: str) -> None:
        if dtype in self.known_dtypes:
            return
        try:
            check_dtype(dtype)
        except TypeError as error:
            raise StateTypeError(f"{shown(key)!r}: {error}", key=shown(key)) from error
        self.known_dtypes.add(dtype)


def _whole(
    key: str, kind: str, array: Any, check: str = "off", bare: bool = False
) -> HeldLeaf:
    shape = None if kind == "per_rank" else tuple(array.shape)
    boxes = (((0,) * len(array.shape), array),)
    return HeldLeaf(key, kind, array.dtype, shape, boxes, check, bare)


def require_inside(key: str, shape: Shape, global_shape: Shape, offset: Shape) -> None:
    """Raise `LayoutError` unless a box lies inside its global array."""
    same_rank = len(shape) == len(global_shape) == len(offset)
    if same_rank and all(
        start >= 0 and start + n <= total <= _INT64_MAX
        for start, n, total in zip(offset, shape, global_shape, strict=True)
    ):
        return
    raise LayoutError(
        f"{shown(key)!r}: a box of shape {tuple(shape)} at offset {tuple(offset)} does "
        f"not lie inside the global shape {tuple(global_shape)}; offset + shape must "
        "not exceed global_shape along any axis, global_shape not 2**63 - 1, and all "
        "three have one length",
        key=shown(key),
    )


def shown(key: str) -> str:
    """Return a key for a message: the root of the tree has an empty one."""
    return key or "%root"
