"""Matches what shards hold with what ranks want, key by key; no I/O, no MPI.

Each key is matched by its owner alone, so no rank ever knows the whole plan.
"""

import itertools
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

import msgspec
import numpy as np

from mpickpt.errors import IncompleteCheckpointError, LayoutError, ManifestError
from mpickpt.format.corners import Indices
from mpickpt.planning.layout import Shape
from mpickpt.planning.load_plan import Transfers, transfers_between, uncovered
from mpickpt.planning.matching_wire import (
    BLOCK,
    EVERYWHERE,
    INT64,
    MUST_AGREE,
    Answer,
    Part,
    packed_rows,
    unpack_parts,
)
from mpickpt.planning.tiling import first_wrong_corner

_Corners = tuple[Indices, Indices]


def answered(arrived: Mapping[int, bytes], size: int) -> dict[int, bytes]:
    """Match what was announced to an owner; return its answer to each rank.

    Raises
    ------
    LayoutError
        Blocks that do not add up to the global array.
    IncompleteCheckpointError, ManifestError
        Elements that no shard holds, or that are stored twice.
    """
    meetings: dict[tuple[str, int], _Meeting] = {}
    for rank, packed in sorted(arrived.items()):
        for part in unpack_parts(packed):
            name = part.key, -1 if part.source is None else part.source
            meeting = meetings.get(name)
            if meeting is None:
                meeting = meetings[name] = _Meeting(part.key)
            meeting.add(rank, part)
    answers: defaultdict[int, Answer] = defaultdict(Answer)
    compared: set[str] = set()
    for (key, _), meeting in sorted(meetings.items(), key=itemgetter(0)):
        if not meeting.need or meeting.sent_whole(answers):
            continue
        meeting.match(size, answers)
        if meeting.any_flag(MUST_AGREE):
            compared.add(key)
    for (key, _), meeting in meetings.items():
        if key in compared:
            for reader, number in meeting.stored_numbers():
                answers[reader].compare.append(number)
    return {rank: msgspec.msgpack.encode(answer) for rank, answer in answers.items()}


class _Meeting:
    """All that ranks said of one array, in rank order."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.ndim = 0
        self.shape: Shape | None = None
        self.have: list[tuple[int, bytes]] = []
        self.need: list[tuple[int, bytes]] = []

    def add(self, rank: int, part: Part) -> None:
        """Take in what one rank says."""
        self.ndim = part.ndim
        if part.stored:
            self.shape = part.shape
            self.have.append((rank, part.stored))
        if part.wanted:
            self.need.append((rank, part.wanted))

    def stored_numbers(self) -> Iterator[tuple[int, int]]:
        """Yield reader and number of each stored item."""
        for reader, rows in self.have:
            for number in array(INT64, rows)[:: 1 + 2 * self.ndim]:
                yield reader, number

    def sent_whole(self, answers: Mapping[int, Answer]) -> bool:
        """Answer at once where one rank wants the only box that is stored, all of it.

        So it is with each rank's own arrays; tables cost twenty times as much.
        """
        if not len(self.have) == len(self.need) == 1:
            return False
        (reader, rows), (dest, wanted) = self.have[0], self.need[0]
        number, *stored = array(INT64, rows)
        item, flags, *box = array(INT64, wanted)
        if stored != [0] * self.ndim + list(self.shape or ()) or box != stored:
            return False
        if flags & (BLOCK | MUST_AGREE):
            return False
        row = packed_rows([number, dest, item, *box])
        answers[reader].sent.append((self.ndim, row))
        return True

    def any_flag(self, flag: int) -> bool:
        """Tell whether a wanted box has a flag."""
        return bool((self.wanted[:, 1] & flag).any())

    def match(self, size: int, answers: Mapping[int, Answer]) -> None:
        """Add what comes of this array to the answers."""
        self.readers, self.stored = _table(self.have, 1 + 2 * self.ndim)
        self.ranks, self.wanted = _table(self.need, 2 + 2 * self.ndim)
        self.place_blocks(answers)
        have = _corners(self.stored[:, 1:], self.ndim)
        need = _corners(self.wanted[:, 2:], self.ndim)
        if not len(self.stored):
            raise _not_stored(self.key, tuple(need[0][0].tolist()))
        assert self.shape is not None
        whole = np.zeros_like(have[0][:1]), np.array([self.shape], dtype=np.int64)
        self.require_tiling(whole, have)
        transfers = transfers_between(have, need)
        gap = uncovered(need, transfers)
        if gap is not None:
            raise _not_stored(self.key, gap)
        if self.goes_everywhere(size, whole, need):
            for reader, number in self.stored_numbers():
                answers[reader].broadcast.append(number)
        else:
            self.send(transfers, answers)

    def place_blocks(self, answers: Mapping[int, Answer]) -> None:
        """Give blocks that follow each other their place, in rank order."""
        if not self.any_flag(BLOCK):
            return
        rows = np.where(self.wanted[:, 1] & BLOCK, self.wanted[:, 2 + self.ndim], 0)
        stops = np.cumsum(rows)
        is_block = (self.wanted[:, 1] & BLOCK) > 0
        self.wanted[is_block, 2] = (stops - rows)[is_block]
        offsets = self.wanted[:, 2 : 2 + self.ndim].tolist()
        numbers = self.wanted[:, 0].tolist()
        for rank, number, offset in zip(
            self.ranks.tolist(), numbers, offsets, strict=True
        ):
            answers[rank].offsets.append((number, tuple(offset)))
        if self.shape is not None and stops[-1] != self.shape[0]:
            raise LayoutError(
                f"array {self.key!r} was saved with {self.shape[0]} rows along axis 0; "
                f"the blocks that the ranks want have {stops[-1]} in all; make them "
                "add up",
                key=self.key,
            )

    def require_tiling(self, whole: _Corners, have: _Corners) -> None:
        """Raise unless the stored boxes hold each element of the array once."""
        if len(have[0]) == 1 and all(map(np.array_equal, whole, have)):
            return
        if not whole[1].all():
            return
        starts, stops = (np.concatenate(pair) for pair in zip(whole, have, strict=True))
        wrong = first_wrong_corner(starts, stops)
        if wrong is None:
            return
        index, excess = wrong
        if excess < 0:
            raise _not_stored(self.key, index)
        raise ManifestError(
            f"array {self.key!r}: index {index} is stored more than once; the "
            "checkpoint was not written by mpickpt"
        )

    def goes_everywhere(self, size: int, whole: _Corners, need: _Corners) -> bool:
        """Tell whether every rank wants the whole array, as it is."""
        if size < 2 or not np.array_equal(self.ranks, np.arange(size)):
            return False
        wants_all = (need[0] == whole[0]).all() and (need[1] == whole[1]).all()
        return bool(wants_all and (self.wanted[:, 1] & EVERYWHERE).all())

    def send(self, transfers: Transfers, answers: Mapping[int, Answer]) -> None:
        """Tell the readers who wants which part of what they read."""
        table = np.column_stack(
            [
                self.stored[transfers.stored, 0],
                self.ranks[transfers.wanted],
                self.wanted[transfers.wanted, 0],
                transfers.offsets,
                transfers.shapes,
            ]
        )
        # Stored boxes stand in the order of their readers, so each has one range.
        readers = self.readers[transfers.stored]
        firsts = np.flatnonzero(np.diff(readers, prepend=-1))
        rows, nbytes = table.tobytes(), table.itemsize * table.shape[1]
        bounds = [*(firsts * nbytes).tolist(), len(rows)]
        for reader, (first, stop) in zip(
            readers[firsts].tolist(), itertools.pairwise(bounds), strict=True
        ):
            answers[reader].sent.append((self.ndim, rows[first:stop]))


def _table(said: Sequence[tuple[int, bytes]], width: int) -> tuple[Indices, Indices]:
    """Return the rank of each row, and the rows, of shape (rows, width)."""
    # A bytearray, so that blocks can be given their place.
    joined = bytearray().join([rows for _, rows in said])
    table = np.frombuffer(joined, np.int64).reshape(-1, width)
    counts = [len(rows) // (8 * width) for _, rows in said]
    return np.repeat(np.array([rank for rank, _ in said], np.int64), counts), table


def _corners(boxes: Indices, ndim: int) -> _Corners:
    return boxes[:, :ndim], boxes[:, :ndim] + boxes[:, ndim:]


def _not_stored(key: str, index: Shape) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"array {key!r}: no shard holds index {index}, which the manifest promises; "
        "the checkpoint was not written by mpickpt, or was damaged"
    )
