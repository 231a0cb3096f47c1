"""Agrees which rank sends what to whom in a load; each key is matched by its owner.

Readers tell the owner of a key which boxes their shards hold, the others which boxes
they want. The owner matches them and answers both sides, so no rank ever knows the
whole plan.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from mpickpt.errors import IncompleteCheckpointError, LayoutError, ManifestError
from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.layout import owner_of
from mpickpt.planning.load_plan import plan_transfers, uncovered
from mpickpt.planning.tiling import first_wrong_index

PHASE = "plan"

Shape = tuple[int, ...]


class StoredItem(msgspec.Struct, frozen=True, array_like=True):
    """A box that a shard holds, as its reader announces it.

    `number` is the reader's own; `source` is the saved rank of a per-rank array.
    """

    key: str
    number: int
    source: int | None
    global_shape: Shape
    offset: Shape
    shape: Shape


class WantedItem(msgspec.Struct, frozen=True, array_like=True):
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


class Sending(msgspec.Struct, frozen=True, array_like=True):
    """What a reader does with a part of a box: send it to a rank, for its item."""

    number: int
    dest: int
    wanted: int
    offset: Shape
    shape: Shape

    @property
    def box(self) -> Hyperslab:
        """The part, in the index space of the global array."""
        return Hyperslab(self.offset, self.shape)


class Answer(msgspec.Struct, array_like=True):
    """What an owner answers to one rank.

    `broadcast` and `compare` name stored items: to be broadcast after reading, and
    to be digested. `offsets` gives the agreed offset of wanted items that are blocks.
    """

    sendings: list[Sending] = []
    broadcast: list[int] = []
    compare: list[int] = []
    offsets: list[tuple[int, Shape]] = []

    def add(self, other: "Answer") -> None:
        """Take in the answer of another owner."""
        self.sendings += other.sendings
        self.broadcast += other.broadcast
        self.compare += other.compare
        self.offsets += other.offsets


class _Announcement(msgspec.Struct, array_like=True):
    stored: list[StoredItem] = []
    wanted: list[WantedItem] = []


def route(
    talk: Conversation, stored: Iterable[StoredItem], wanted: Iterable[WantedItem]
) -> Steps[Answer]:
    """Tell the owners what is here and what is wanted; return what this rank does.

    Raises
    ------
    LayoutError
        Blocks that do not add up to the global array.
    IncompleteCheckpointError, ManifestError
        Elements that no shard holds, or that are stored twice.
    """
    announcements: defaultdict[int, _Announcement] = defaultdict(_Announcement)
    for have in stored:
        announcements[owner_of(have.key, talk.size)].stored.append(have)
    for want in wanted:
        announcements[owner_of(want.key, talk.size)].wanted.append(want)
    packed = {r: msgspec.msgpack.encode(a) for r, a in announcements.items()}
    arrived = yield from talk.exchange(packed, PHASE)
    answers = yield from talk.agree(lambda: _match(arrived, talk.size), PHASE)
    packed = {r: msgspec.msgpack.encode(a) for r, a in answers.items()}
    arrived = yield from talk.exchange(packed, PHASE)
    total = Answer([], [], [], [])
    for answer in arrived.values():
        total.add(msgspec.msgpack.decode(answer, type=Answer))
    return total


class _Meeting:
    """All that ranks said of one array: (rank, item) pairs."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, StoredItem]] = []
        self.wanted: list[tuple[int, WantedItem]] = []


def _match(arrived: Mapping[int, bytes], size: int) -> dict[int, Answer]:
    meetings: defaultdict[tuple[str, Any], _Meeting] = defaultdict(_Meeting)
    for rank, packed in arrived.items():
        announcement = msgspec.msgpack.decode(packed, type=_Announcement)
        for have in announcement.stored:
            meetings[have.key, have.source].stored.append((rank, have))
        for want in announcement.wanted:
            meetings[want.key, want.source].wanted.append((rank, want))
    answers: defaultdict[int, Answer] = defaultdict(lambda: Answer([], [], [], []))
    compared: set[str] = set()
    for (key, _), meeting in sorted(meetings.items(), key=_by_key):
        if meeting.wanted:
            _match_one(key, meeting, size, answers)
        if any(want.must_agree for _, want in meeting.wanted):
            compared.add(key)
    for (key, _), meeting in meetings.items():
        if key in compared:
            for reader, have in meeting.stored:
                answers[reader].compare.append(have.number)
    return answers


def _by_key(entry: tuple[tuple[str, Any], _Meeting]) -> tuple[str, int]:
    (key, source), _ = entry
    return key, -1 if source is None else source


def _match_one(
    key: str, meeting: _Meeting, size: int, answers: Mapping[int, Answer]
) -> None:
    meeting.wanted.sort(key=lambda pair: pair[0])
    wanted = _placed(key, meeting, answers)
    stored = [Hyperslab(item.offset, item.shape) for _, item in meeting.stored]
    _require_tiling(key, meeting, stored)
    transfers = plan_transfers(stored, wanted)
    gap = uncovered(wanted, stored, transfers)
    if gap is not None:
        raise _not_stored(key, gap)
    if _goes_everywhere(meeting, size):
        for reader, have in meeting.stored:
            answers[reader].broadcast.append(have.number)
        return
    for i, j, box in transfers:
        reader, have = meeting.stored[i]
        dest, want = meeting.wanted[j]
        answers[reader].sendings.append(
            Sending(have.number, dest, want.number, box.offset, box.shape)
        )


def _require_tiling(key: str, meeting: _Meeting, stored: Sequence[Hyperslab]) -> None:
    """Raise unless the stored boxes hold each element of the array once."""
    if not stored:
        return
    wrong = first_wrong_index(whole(meeting.stored[0][1].global_shape), stored)
    if wrong is None:
        return
    index, excess = wrong
    if excess < 0:
        raise _not_stored(key, index)
    raise ManifestError(
        f"array {key!r}: index {index} is stored more than once; the checkpoint was "
        "not written by mpickpt"
    )


def _not_stored(key: str, index: Shape) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"array {key!r}: no shard holds index {index}, which the manifest promises; "
        "the checkpoint was not written by mpickpt, or was damaged"
    )


def _placed(
    key: str, meeting: _Meeting, answers: Mapping[int, Answer]
) -> list[Hyperslab]:
    """Return the boxes that are wanted; blocks get their place, in rank order."""
    if not any(item.block for _, item in meeting.wanted):
        return [Hyperslab(item.offset, item.shape) for _, item in meeting.wanted]
    saved = meeting.stored[0][1].global_shape if meeting.stored else None
    boxes, start = [], 0
    for rank, item in meeting.wanted:
        offset = (start, *item.offset[1:]) if item.block else item.offset
        boxes.append(Hyperslab(offset, item.shape))
        answers[rank].offsets.append((item.number, offset))
        start += item.shape[0] if item.block else 0
    if saved is not None and start != saved[0]:
        raise LayoutError(
            f"array {key!r} was saved with {saved[0]} rows along axis 0; the blocks "
            f"that the ranks want have {start} in all; make them add up",
            key=key,
        )
    return boxes


def _goes_everywhere(meeting: _Meeting, size: int) -> bool:
    """Tell whether every rank wants the whole array, as it is."""
    if size < 2 or len(meeting.wanted) != size or not meeting.stored:
        return False
    room = whole(meeting.stored[0][1].global_shape)
    return {rank for rank, _ in meeting.wanted} == set(range(size)) and all(
        item.everywhere and Hyperslab(item.offset, item.shape) == room
        for _, item in meeting.wanted
    )


def by_number(sendings: Sequence[Sending]) -> dict[int, list[Sending]]:
    """Return the sendings of each stored item."""
    found: defaultdict[int, list[Sending]] = defaultdict(list)
    for sending in sendings:
        found[sending.number].append(sending)
    return dict(found)
