"""Builds a restored state: containers, wrappers, records and live objects."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpickpt.errors import CheckpointError, StateTypeError
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.tree import (
    ArrayNode,
    DictNode,
    Key,
    ListNode,
    LiveNode,
    Node,
    Plain,
    RecordNode,
    ScopeNode,
)
from mpickpt.planning.flatten import HeldLeaf
from mpickpt.planning.live import set_live_state
from mpickpt.state import PerRank, Replicated, Sharded

Build = Callable[[], Any]


def wrapped(
    kind: str, boxes: Sequence[Any], shape: Any, bare: bool, dtype: Any = None
) -> Any:
    """Return an array in its wrapper.

    Parameters
    ----------
    kind : str
        "sharded", "replicated" or "per_rank".
    boxes : sequence of (offset, array)
        In the index space of the global array.
    shape : tuple of int or None
        Global shape; None for a block whose place is not agreed.
    bare : bool
        Leave the wrapper of a whole array out: another one is around it.
    dtype : dtype, optional
        Of the elements, for a rank that holds none: its tree can be saved again.
    """
    if kind == "sharded":
        if shape is None:
            return Sharded.block(boxes[0][1])
        if len(boxes) == 1:
            return Sharded(boxes[0][1], shape, boxes[0][0])
        return Sharded.pieces(boxes, global_shape=shape, dtype=dtype)
    array = boxes[0][1]
    if bare:
        return array
    return PerRank(array) if kind == "per_rank" else Replicated(array)


def placed(targets: Sequence[tuple[Hyperslab, Any]]) -> tuple[tuple[Any, Any], ...]:
    """Return (offset, array) for each target."""
    return tuple((box.offset, array) for box, array in targets)


def in_scope(scope: ScopeNode, child: Build) -> Build:
    """Return what builds a wrapper of the template around its content."""
    if scope.wrapper == "per_rank":
        rule: Any = scope.rule or scope.option
        return lambda: PerRank(child(), rule)
    check: Any = scope.option
    return lambda: Replicated(child(), check)


def in_list(form: str, items: Sequence[Build | None]) -> Build:
    """Return what builds a list or a tuple; None stands for what was not selected."""
    make = list if form == "list" else tuple
    return lambda: make(build() if build else None for build in items)


def left_out() -> None:
    """Stand for an entry that a dict is built without."""


def in_dict(items: Mapping[Key, Build]) -> Build:
    """Return what builds a dict."""
    built = {key: build for key, build in items.items() if build is not left_out}
    return lambda: {key: build() for key, build in built.items()}


def in_record(origin: Any, fields: Mapping[Key, Build]) -> Build:
    """Return what builds a dataclass or a namedtuple."""

    def build() -> Any:
        values = {str(key): value() for key, value in fields.items()}
        if hasattr(origin, "_make"):
            return origin(**values)
        record = object.__new__(origin)  # fields may be frozen, or not init arguments
        for name, value in values.items():
            object.__setattr__(record, name, value)
        return record

    return build


def in_live(origin: Any, state: Build) -> Build:
    """Return what gives a live object its state."""

    def build() -> Any:
        value = state()
        try:
            set_live_state(origin, value)
        except CheckpointError:
            raise  # it says itself what does not fit
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise StateTypeError(
                f"a {type(origin).__qualname__} did not take the state that was saved: "
                f"{error}; is it of the same kind as the one that was saved?"
            ) from error
        return origin

    return build


def as_it_is(like: Node, leaves: Sequence[HeldLeaf], scoped: bool = False) -> Build:
    """Return what builds an entry of the template with the values that it has."""

    def inner(child: Node) -> Build:
        return as_it_is(child, leaves, scoped)

    if isinstance(like, ArrayNode):
        leaf = leaves[like.ordinal]
        bare = scoped or leaf.bare
        return lambda: wrapped(
            leaf.kind, leaf.boxes, leaf.global_shape, bare, leaf.dtype
        )
    if isinstance(like, ScopeNode):
        return in_scope(like, as_it_is(like.child, leaves, scoped=True))
    if isinstance(like, RecordNode):
        return in_record(like.origin, {key: inner(n) for key, n in like.items})
    if isinstance(like, DictNode):
        return in_dict({key: inner(child) for key, child in like.items})
    if isinstance(like, ListNode):
        return in_list(like.form, [inner(child) for child in like.items])
    if isinstance(like, LiveNode):
        return lambda: like.origin
    return lambda: like.value if isinstance(like, Plain) else None
