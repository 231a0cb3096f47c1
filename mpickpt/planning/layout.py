"""Defines who holds and who writes which box of an array; no I/O, no MPI.

Every rank describes its part of an array as a `HeldArray`. The descriptions of one
key meet at the rank `owner_of` names, where `resolve.resolve_array` checks them
together. Each holder is sent a `HolderAnswer`; the root collects a `LayoutEntry` for
the layout file. All boxes are in the index space of the global array, in elements.

The records are structs that the garbage collector need not look at: large worlds have
millions, and none of them can lead back to itself.
"""

import functools
import zlib
from collections.abc import Mapping, Sequence
from operator import eq

import msgspec

from mpickpt.format.hyperslab import Hyperslab, row_part, split_rows
from mpickpt.format.layout_document import LayoutEntry, Ranks
from mpickpt.planning.rank_grid import Holders, place_of

Shape = tuple[int, ...]


class HeldArray(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one rank says of one array.

    Attributes
    ----------
    key : str
        Canonical key.
    kind : str
        One of `layout_document.KINDS`.
    dtype : str or None
        None where this rank has no piece and cannot know.
    global_shape : tuple of int or None
        None for consecutive blocks along axis 0 in rank order, whose offsets and
        total are agreed; also for per-rank arrays and plain values.
    boxes : tuple of Hyperslab
        The offset of a consecutive block is ignored.
    """

    key: str
    kind: str
    dtype: str | None
    global_shape: Shape | None
    boxes: tuple[Hyperslab, ...]


class Share(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Who holds one box, and who of them writes it.

    The box is split along axis 0 into `nparts` even parts; part i is written by
    `holders[(start + i) % len(holders)]`, so no rank writes more than one.

    Attributes
    ----------
    holders : range, RankGrid or tuple of int
        Ascending ranks, in the shortest of these forms.
    start : int
        Position in `holders` of the writer of the first part.
    nparts : int
        At least 1, at most the number of holders.
    """

    holders: Holders
    start: int
    nparts: int

    def parts(self, box: Hyperslab) -> list[tuple[Hyperslab, int]]:
        """Return the parts of the box, each with the rank that writes it."""
        return [
            (part, self.holders[(self.start + i) % len(self.holders)])
            for i, part in enumerate(split_rows(box, self.nparts))
        ]

    def part_of(self, box: Hyperslab, rank: int) -> Hyperslab | None:
        """Return the part of the box that a rank writes, None if it writes none."""
        place = place_of(self.holders, rank)
        if place is None:
            return None
        turn = (place - self.start) % len(self.holders)
        return row_part(box, turn, self.nparts) if turn < self.nparts else None


class ArrayLayout(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One array as all its holders agree on it.

    Attributes
    ----------
    key, kind : str
        As described by the holders.
    dtype : str
        "" for plain values. Per-rank arrays may differ: that of the lowest rank.
    global_shape : tuple of int or None
        None for per-rank arrays and plain values.
    boxes : tuple of (Hyperslab, Share)
        Distinct boxes; those with elements tile the array. Empty for per-rank arrays.
    held : mapping of int to tuple of int
        For each rank that described the array, its boxes as positions in `boxes`.
    """

    key: str
    kind: str
    dtype: str
    global_shape: Shape | None
    boxes: tuple[tuple[Hyperslab, Share], ...]
    held: Mapping[int, Shape]

    def boxes_of(self, rank: int) -> tuple[tuple[Hyperslab, Share], ...]:
        """Return the boxes of one rank, in the order in which it described them."""
        return tuple([self.boxes[i] for i in self.held.get(rank, ())])


class HolderAnswer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the owner of a key tells one holder: its boxes, and who writes them."""

    key: str
    dtype: str
    global_shape: Shape | None
    boxes: tuple[tuple[Hyperslab, Share], ...]


def owner_of(key: str, size: int) -> int:
    """Return the rank that checks the layout of a key, the same on all ranks."""
    return zlib.crc32(key.encode()) % size


def answer_for(layout: ArrayLayout, rank: int) -> HolderAnswer:
    """Return what one holder must know of an array."""
    return HolderAnswer(
        key=layout.key,
        dtype=layout.dtype,
        global_shape=layout.global_shape,
        boxes=layout.boxes_of(rank),
    )


def entry_of(layout: ArrayLayout) -> LayoutEntry:
    """Return the array as the layout file lists it."""
    per_rank = layout.kind == "per_rank"
    return LayoutEntry(
        key=layout.key,
        kind=layout.kind,
        dtype=layout.dtype,
        global_shape=layout.global_shape,
        parts=tuple(
            (writer, part)
            for box, share in layout.boxes
            for part, writer in share.parts(box)
        ),
        holders=compact(sorted(layout.held)) if per_rank else (),
    )


@functools.lru_cache(maxsize=1 << 17)
def sole(rank: int) -> Share:
    """Return the share of a box that one rank holds."""
    # Most boxes have one holder; a million equal records would be a second of work.
    return Share(holders=range(rank, rank + 1), start=0, nparts=1)


def compact(ranks: Sequence[int]) -> Ranks:
    """Return ascending ranks as a range where they are an arithmetic progression."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    progression = range(ranks[0], ranks[-1] + 1, step)
    is_progression = len(progression) == len(ranks) and all(map(eq, progression, ranks))
    return progression if is_progression else tuple(ranks)
