"""Compares two checkpoints, whatever ranks they were saved by; reads files only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpickpt.errors import ManifestError
from mpickpt.format.digest import BLOCK_NBYTES
from mpickpt.format.hyperslab import contiguous_pieces, whole
from mpickpt.format.records import ArrayRecord
from mpickpt.format.tree import Plain, SavedLeaf
from mpickpt.planning.tree_walk import leaves
from mpickpt.storage.array_reader import Array
from mpickpt.storage.checkpoint_reader import Checkpoint

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which two checkpoints differ.

    Attributes
    ----------
    key : str
        Where it is.
    what : {"only in one", "type", "value", "array"}
        What differs.
    a, b : str
        How it is in the one and in the other.
    index : tuple of int or None
        First index in C order at which the elements of an array differ.
    rank : int or None
        Saved rank, where each has an array of its own.
    """

    key: str
    what: str
    a: str
    b: str
    index: Index | None = None
    rank: int | None = None


def compare(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    """Yield what differs between two checkpoints, arrays last.

    Notes
    -----
    Elements are compared bit by bit: a nan equals itself, 0.0 and -0.0 differ. How
    arrays are split over ranks makes no difference, but per-rank arrays and values
    do differ when the number of ranks does.
    """
    yield from _compare_values(a, b)
    records = {r.key: r for r in b.manifest.arrays}
    both = [(r, records.pop(r.key, None)) for r in a.manifest.arrays]
    for record, other in both:
        if other is None:
            yield _only(record.key, record, None)
        elif _type(record) != _type(other):
            yield Difference(
                key=record.key, what="type", a=_type(record), b=_type(other)
            )
    yield from (_only(key, None, record) for key, record in records.items())
    for record, other in both:
        if other is not None and _type(record) == _type(other):
            yield from _compare_array(a, b, record)


def _compare_values(a: Checkpoint, b: Checkpoint) -> Iterator[Difference]:
    ours, theirs = _plain_values(a), _plain_values(b)
    for key in dict.fromkeys([*ours, *theirs]):
        in_a, in_b = ours.get(key), theirs.get(key)
        if in_a != in_b:
            what = "only in one" if in_a is None or in_b is None else "value"
            yield Difference(key=key, what=what, a=_told(in_a), b=_told(in_b))


@dataclass(slots=True)
class _Value:
    """A plain value as it was saved: `others` are those that differ from the first."""

    first: str
    others: dict[int, str]
    ranks: list[int] | None


def _plain_values(checkpoint: Checkpoint) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    world_size = checkpoint.manifest.world_size
    for rank in range(world_size):
        for key, leaf in leaves(checkpoint.tree_of(rank)):
            if isinstance(leaf, SavedLeaf):
                continue
            text = _text_of(leaf.value) if isinstance(leaf, Plain) else "empty"
            value = values.setdefault(key or "%root", _Value(text, {}, []))
            assert value.ranks is not None
            value.ranks.append(rank)
            if text != value.first:
                value.others[rank] = text
    for value in values.values():
        # Of a value that all ranks have it does not matter how many they are.
        if len(value.ranks or ()) == world_size:
            value.ranks = None
    return values


def _text_of(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return hex(value)


def _told(value: _Value | None) -> str:
    if value is None:
        return "absent"
    others = [f", {text} on rank {rank}" for rank, text in value.others.items()]
    only = "" if value.ranks is None else f" on {len(value.ranks)} ranks"
    return value.first + only + "".join(others)


def _only(key: str, a: ArrayRecord | None, b: ArrayRecord | None) -> Difference:
    in_a, in_b = (_type(r) if r is not None else "absent" for r in (a, b))
    return Difference(key=key, what="only in one", a=in_a, b=in_b)


def _type(record: ArrayRecord) -> str:
    shape = "" if record.global_shape is None else f" {record.global_shape}"
    return f"{record.kind} {record.dtype}{shape}"


def _compare_array(
    a: Checkpoint, b: Checkpoint, record: ArrayRecord
) -> Iterator[Difference]:
    if record.kind == "per_rank":
        yield from _compare_per_rank(a, b, record.key)
        return
    found = _first_difference(a, b, record.key)
    if found is not None:
        index, in_a, in_b = found
        yield Difference(key=record.key, what="array", a=in_a, b=in_b, index=index)


def _first_difference(
    a: Checkpoint, b: Checkpoint, key: str
) -> tuple[Index, str, str] | None:
    x, y = a[key], b[key]
    first: tuple[Index, str, str] | None = None
    # Box by box, a large array is read once, however it was split; a small one anyway.
    small = x.nbytes <= BLOCK_NBYTES
    for box in [whole(x.shape)] if small else a.stored_boxes(key):
        for piece in contiguous_pieces(box.shape, x.dtype.itemsize, BLOCK_NBYTES):
            offset = tuple(map(sum, zip(piece.offset, box.offset, strict=True)))
            ends = zip(offset, piece.shape, strict=True)
            place = (*(slice(start, start + n) for start, n in ends), ...)
            found = _first_unequal(x[place], y[place])
            if found is not None:
                inner, in_a, in_b = found
                index = tuple(map(sum, zip(offset, inner, strict=True)))
                # Boxes lie in the order of ranks, which need not be that of indices.
                first = min(first or (index, in_a, in_b), (index, in_a, in_b))
    return first


def _compare_per_rank(a: Checkpoint, b: Checkpoint, key: str) -> Iterator[Difference]:
    sizes = a.manifest.world_size, b.manifest.world_size
    for rank in range(max(sizes)):
        x, y = _own(a, key, rank), _own(b, key, rank)
        if x is None and y is None:
            continue
        if x is None or y is None:
            in_a, in_b = (_own_type(one) for one in (x, y))
            yield Difference(key=key, what="only in one", a=in_a, b=in_b, rank=rank)
        elif (x.shape, x.dtype) != (y.shape, y.dtype):
            in_a, in_b = _own_type(x), _own_type(y)
            yield Difference(key=key, what="type", a=in_a, b=in_b, rank=rank)
        elif (found := _first_unequal(x, y)) is not None:
            index, in_a, in_b = found
            yield Difference(
                key=key, what="array", a=in_a, b=in_b, index=index, rank=rank
            )


def _own(checkpoint: Checkpoint, key: str, rank: int) -> Array | None:
    try:
        array = checkpoint.per_rank(key)[rank]
    except LookupError:
        return None
    if not isinstance(array, np.ndarray):
        raise ManifestError(
            f"{checkpoint.path}: {key!r} is no array in the shard of rank {rank}"
        )
    return array


def _own_type(array: Array | None) -> str:
    return "absent" if array is None else f"{array.dtype} {array.shape}"


def _first_unequal(x: Array, y: Array) -> tuple[Index, str, str] | None:
    """Return the first index at which two arrays differ in any bit, and both values."""
    if not x.size or np.array_equal(_bits(x), _bits(y)):
        return None
    place = int(np.argmax((_bits(x) != _bits(y)).any(axis=1)))
    index = tuple(int(i) for i in np.unravel_index(place, x.shape))
    return index, str(x[index]), str(y[index])


def _bits(array: Array) -> Array:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(len(flat), -1)
