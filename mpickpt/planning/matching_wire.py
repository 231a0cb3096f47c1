"""What readers and owners of keys tell each other in a load, as MessagePack; pure.

Readers tell the owner of a key which boxes their shards hold, the others which boxes
they want; the owner answers both. Boxes travel as rows of int64, since thousands of
ranks meet at one owner.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from mpickpt.format.hyperslab import Hyperslab
from mpickpt.planning.layout import Shape, owner_of


class StoredItem(msgspec.Struct, frozen=True, gc=False):
    """A box that a shard holds, as its reader announces it.

    `number` is the reader's own; `source` is the saved rank of a per-rank array.
    """

    key: str
    number: int
    source: int | None
    global_shape: Shape
    offset: Shape
    shape: Shape


class WantedItem(msgspec.Struct, frozen=True, gc=False):
    """A box that a rank wants.

    `number` is the rank's own. `block`: the offset is agreed, in rank order.
    `everywhere`: it may come by broadcast, being the whole of a replicated array.
    `must_agree`: the per-rank array has to be equal on all saved ranks.
    """

    key: str
    number: int
    source: int | None
    offset: Shape
    shape: Shape
    block: bool = False
    everywhere: bool = False
    must_agree: bool = False


class Sending(msgspec.Struct, frozen=True, gc=False):
    """What a reader does with a part of a box: send it to a rank, for its item."""

    number: int
    dest: int
    wanted: int
    box: Hyperslab


class Answer(msgspec.Struct, array_like=True, gc=False):
    """What an owner answers to one rank.

    `sent` has, for a key each, the number of axes and rows (number, dest, wanted,
    offset, shape) of int64, one after the other. `broadcast` and `compare` name
    stored items: to be broadcast after reading, and to be digested. `offsets` gives
    the agreed offset of wanted items that are blocks.
    """

    sent: list[tuple[int, bytes]] = []
    broadcast: list[int] = []
    compare: list[int] = []
    offsets: list[tuple[int, Shape]] = []

    def sendings(self) -> list[Sending]:
        """Return what this rank sends of its stored boxes, itself included."""
        found = []
        for ndim, rows in self.sent:
            flat = array(INT64, rows).tolist()
            for row in range(0, len(flat), 3 + 2 * ndim):
                number, dest, wanted, *ends = flat[row : row + 3 + 2 * ndim]
                box = Hyperslab(tuple(ends[:ndim]), tuple(ends[ndim:]))
                found.append(Sending(number, dest, wanted, box))
        return found


class Part(msgspec.Struct, array_like=True, gc=False):
    """What one rank says of one array: rows of int64, one after the other.

    `shape` is the global shape; None where the rank stores nothing of it. Rows of
    `stored` are (number, offset, shape), of `wanted` (number, flags, offset, shape).
    """

    key: str
    source: int | None
    ndim: int
    shape: Shape | None
    stored: bytes
    wanted: bytes


BLOCK, EVERYWHERE, MUST_AGREE = 1, 2, 4
INT64 = "q"
_PARTS = msgspec.msgpack.Decoder(list[Part])
_ANSWER = msgspec.msgpack.Decoder(Answer)


def announcements(
    stored: Iterable[StoredItem], wanted: Iterable[WantedItem], size: int
) -> dict[int, bytes]:
    """Return what a rank tells each owner: what its shards hold, what it wants."""
    said: dict[tuple[str, int | None], _Said] = {}
    for have in stored:
        one = said.get((have.key, have.source))
        if one is None:
            one = said[have.key, have.source] = _Said(have.global_shape)
        one.stored += (have.number, *have.offset, *have.shape)
    for want in wanted:
        one = said.get((want.key, want.source))
        if one is None:
            one = said[want.key, want.source] = _Said(None, len(want.shape))
        flags = want.block + 2 * want.everywhere + 4 * want.must_agree
        one.wanted += (want.number, flags, *want.offset, *want.shape)
    by_owner: defaultdict[int, list[Part]] = defaultdict(list)
    for (key, source), one in said.items():
        by_owner[owner_of(key, size)].append(one.packed(key, source))
    return {owner: msgspec.msgpack.encode(own) for owner, own in by_owner.items()}


class _Said:
    """What one rank has to say of one array."""

    __slots__ = ("ndim", "shape", "stored", "wanted")

    def __init__(self, shape: Shape | None, ndim: int = 0) -> None:
        self.shape = shape
        self.ndim = ndim if shape is None else len(shape)
        self.stored: list[int] = []
        self.wanted: list[int] = []

    def packed(self, key: str, source: int | None) -> Part:
        stored, wanted = map(packed_rows, (self.stored, self.wanted))
        return Part(key, source, self.ndim, self.shape, stored, wanted)


def packed_rows(numbers: Iterable[int]) -> bytes:
    """Return integers as they travel."""
    return array(INT64, numbers).tobytes()


def unpack_parts(packed: bytes) -> list[Part]:
    """Return what one rank announced to an owner."""
    return _PARTS.decode(packed)


def answer_of(arrived: Iterable[bytes]) -> Answer:
    """Return what one rank does, from the answers of all owners."""
    total = Answer()
    for packed in arrived:
        answer = _ANSWER.decode(packed)
        total.sent += answer.sent
        total.broadcast += answer.broadcast
        total.compare += answer.compare
        total.offsets += answer.offsets
    return total
