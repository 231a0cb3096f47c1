"""Agrees on the layout of one array from what each holder says; no I/O, no MPI."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NoReturn, TypeVar

from mpickpt.errors import LayoutError
from mpickpt.format.corners import first_outside
from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.planning.layout import ArrayLayout, HeldArray, Shape
from mpickpt.planning.sharing import share_out
from mpickpt.planning.tiling import first_wrong_index

T = TypeVar("T")

_INT64_MAX = 2**63 - 1
# A plain value is one element without axes, so it is shared out like any box.
_POINT = Hyperslab((), ())


def resolve_array(key: str, held: Sequence[tuple[int, HeldArray]]) -> ArrayLayout:
    """Return the layout on which all that hold an array agree.

    Parameters
    ----------
    key : str
        Canonical key of the array.
    held : sequence of (int, HeldArray)
        At least one; every rank that has the key, once, with its description.

    Returns
    -------
    ArrayLayout
        Identical boxes are replicas, whose writing is shared out by bytes.

    Raises
    ------
    LayoutError
        Kinds, dtypes or shapes that differ between ranks; a box outside the array, a
        gap, an overlap.
    """
    by_rank = dict(sorted(held, key=itemgetter(0)))
    kind = _agreed(key, "kind", {rank: one.kind for rank, one in by_rank.items()})
    if kind == "per_rank":
        return _per_rank_layout(key, by_rank)
    if kind == "replicated_plain":
        points = _distinct(dict.fromkeys(by_rank, (_POINT,)))
        return _shared_out(key, kind, "", None, points)
    shapes = {rank: one.global_shape for rank, one in by_rank.items()}
    global_shape = _agreed(key, "global shape", shapes)
    boxes = {rank: one.boxes for rank, one in by_rank.items()}
    if global_shape is None:
        global_shape, distinct = _consecutive(key, boxes)
    else:
        distinct = _distinct(boxes)
        _require_tiling(key, kind, global_shape, distinct)
    dtype = _agreed_dtype(key, by_rank)
    return _shared_out(key, kind, dtype, global_shape, distinct)


@dataclass(frozen=True, slots=True)
class _Distinct:
    """The distinct boxes of an array, who holds each, and which each rank holds."""

    boxes: list[Hyperslab]
    holders: list[list[int]]
    held: dict[int, Shape]


def _distinct(claims: Mapping[int, Sequence[Hyperslab]]) -> _Distinct:
    positions: dict[tuple[Shape, Shape], int] = {}
    boxes: list[Hyperslab] = []
    holders: list[list[int]] = []
    held: dict[int, Shape] = {}
    for rank, claimed in claims.items():
        own = []
        for box in claimed:
            i = positions.setdefault((box.offset, box.shape), len(boxes))
            if i == len(boxes):
                boxes.append(box)
                holders.append([rank])
            elif holders[i][-1] != rank:
                holders[i].append(rank)
            own.append(i)
        held[rank] = tuple(own)
    return _Distinct(boxes, holders, held)


def _per_rank_layout(key: str, by_rank: Mapping[int, HeldArray]) -> ArrayLayout:
    dtypes = (one.dtype for one in by_rank.values() if one.dtype is not None)
    return ArrayLayout(
        key=key,
        kind="per_rank",
        dtype=next(dtypes, ""),
        global_shape=None,
        boxes=(),
        held=dict.fromkeys(by_rank, ()),
    )


def _consecutive(
    key: str, claims: Mapping[int, tuple[Hyperslab, ...]]
) -> tuple[Shape, _Distinct]:
    """Return global shape and boxes of blocks that follow each other in rank order."""
    for rank, claimed in claims.items():
        if len(claimed) != 1 or not claimed[0].shape:
            _refuse(
                key,
                [rank],
                f"rank {rank} holds {len(claimed)} boxes as consecutive blocks; "
                "expected one box of at least one axis: give offset and global_shape "
                "for several boxes, Replicated for a 0-d array",
            )
    shapes = {rank: claimed[0].shape for rank, claimed in claims.items()}
    beyond = {rank: shape[1:] for rank, shape in shapes.items()}
    trailing = _agreed(key, "shape beyond axis 0", beyond)
    zeros = (0,) * len(trailing)
    rows = [shape[0] for shape in shapes.values()]
    *firsts, total = itertools.accumulate(rows, initial=0)
    boxes = [
        Hyperslab((first, *zeros), shape)
        for first, shape in zip(firsts, shapes.values(), strict=True)
    ]
    held: dict[int, Shape] = {rank: (i,) for i, rank in enumerate(claims)}
    return (total, *trailing), _Distinct(boxes, [[rank] for rank in claims], held)


def _agreed(key: str, what: str, values: Mapping[int, T]) -> T:
    """Return the value that all ranks give."""
    first_rank, first = next(iter(values.items()))
    if len(set(values.values())) == 1:
        return first
    rank, other = next(pair for pair in values.items() if pair[1] != first)
    _refuse(
        key,
        [first_rank, rank],
        f"rank {first_rank} gives {what} {_said(first)}, rank {rank} gives "
        f"{_said(other)}; expected the same on all ranks that have it: correct one",
    )


def _said(value: object) -> str:
    return "none (consecutive blocks)" if value is None else repr(value)


def _agreed_dtype(key: str, by_rank: Mapping[int, HeldArray]) -> str:
    known = {rank: one.dtype for rank, one in by_rank.items() if one.dtype is not None}
    if not known:
        _refuse(
            key,
            list(by_rank),
            "no rank holds a piece of it, so nobody knows its dtype; expected a dtype "
            "from at least one rank: pass dtype= to Sharded.pieces",
        )
    return _agreed(key, "dtype", known)


def _require_tiling(
    key: str, kind: str, global_shape: Shape, distinct: _Distinct
) -> None:
    if not all(0 <= extent <= _INT64_MAX for extent in global_shape):
        _refuse(
            key,
            list(distinct.held),
            f"global shape {global_shape}; expected extents from 0 to 2**63 - 1",
        )
    outside = _first_outside(kind, global_shape, distinct.boxes)
    if outside is not None:
        _refuse_outside(key, kind, global_shape, distinct, outside)
    tiles = [box for box in distinct.boxes if 0 not in box.shape]
    wrong = first_wrong_index(whole(global_shape), tiles)
    if wrong is None:
        return
    index, excess = wrong
    if excess > 0:
        _refuse_overlap(key, index, distinct)
    _refuse(
        key,
        list(distinct.held),
        f"no rank holds index {index} of global shape {global_shape}, the first that "
        "is missing; expected every element on some rank: correct offset, shape or "
        "global_shape",
    )


def _first_outside(
    kind: str, global_shape: Shape, boxes: Sequence[Hyperslab]
) -> int | None:
    """Return the position of the first box that is not where its kind allows."""
    room = whole(global_shape)
    if kind == "replicated":
        return next((i for i, box in enumerate(boxes) if box != room), None)
    return first_outside(room, boxes)


def _refuse_outside(
    key: str, kind: str, global_shape: Shape, distinct: _Distinct, i: int
) -> NoReturn:
    rank, box = distinct.holders[i][0], distinct.boxes[i]
    place = "that covers" if kind == "replicated" else "inside"
    _refuse(
        key,
        distinct.holders[i],
        f"rank {rank} holds a box of {_box_text(box)}; expected one {place} the "
        f"global shape {global_shape}: correct offset, shape or global_shape",
    )


def _refuse_overlap(key: str, index: Shape, distinct: _Distinct) -> NoReturn:
    point = Hyperslab(index, (1,) * len(index))
    hit = [i for i, box in enumerate(distinct.boxes) if box.contains(point)]
    shown = " and ".join(
        f"rank {distinct.holders[i][0]} ({_box_text(distinct.boxes[i])})"
        for i in hit[:2]
    )
    _refuse(
        key,
        sorted({rank for i in hit for rank in distinct.holders[i]}),
        f"index {index} lies in the boxes of {shown}, {len(hit)} different boxes in "
        "all; expected boxes that are identical (replicas) or have no element in "
        "common: correct offset or shape",
    )


def _box_text(box: Hyperslab) -> str:
    return f"offset {box.offset}, shape {box.shape}"


def _refuse(key: str, ranks: Sequence[int], fault: str) -> NoReturn:
    raise LayoutError(f"array {key!r}: {fault}", key=key, ranks=list(ranks))


def _shared_out(
    key: str, kind: str, dtype: str, global_shape: Shape | None, distinct: _Distinct
) -> ArrayLayout:
    shares = share_out(key, dtype, distinct.boxes, distinct.holders)
    return ArrayLayout(
        key=key,
        kind=kind,
        dtype=dtype,
        global_shape=global_shape,
        boxes=tuple(zip(distinct.boxes, shares, strict=True)),
        held=distinct.held,
    )
