"""Fills the wanted arrays: reads each shard once, verifies it, and passes boxes on."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from threading import Event
from typing import Any

import numpy as np

from mpickpt.format.dtypes import dtype_name, parse_dtype
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.parallel.broadcast import broadcast_in_rounds
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.options import default_direct_io
from mpickpt.parallel.parcels import Parcels, packing
from mpickpt.parallel.per_rank_agreement import require_equal
from mpickpt.parallel.redistribute import Redistribution
from mpickpt.parallel.routing import by_number, route
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.load_plan import plan_transfers
from mpickpt.planning.matching_wire import Answer, StoredItem, WantedItem
from mpickpt.planning.tiling import first_wrong_index
from mpickpt.planning.wants import Want
from mpickpt.storage.delivery import Delivery, Digested, InBoxes, Placed
from mpickpt.storage.places import read_nbytes_at_once, reads_direct
from mpickpt.storage.shard_reader import ShardReader
from mpickpt.storage.stored_box import StoredBox, spans_and_check, stored_boxes
from mpickpt.storage.stream import read_shard

PHASE = "read"

Array = np.ndarray[Any, Any]


class Fetch:
    """One rank's reading of a checkpoint.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    readers : sequence of ShardReader
        The shards that this rank reads; their indexes are verified.
    wants : sequence of Want
        The arrays that this rank wants, with the targets to fill.
    verify : {"sha256", "crc32", "none"}
        How whole shards are verified.
    partial : bool
        Only some arrays are wanted: just the blocks that hold them are read, and
        verified by CRC-32.
    tag : int
        Of this load alone.
    turn_s : float
        How long this rank waits before it opens shards.
    """

    def __init__(
        self,
        talk: Conversation,
        readers: Sequence[ShardReader],
        wants: Sequence[Want],
        *,
        verify: str,
        partial: bool,
        tag: int,
        turn_s: float = 0.0,
    ) -> None:
        self.talk = talk
        self.readers = readers
        self.verify = "crc32" if partial and verify == "sha256" else verify
        self.partial = partial
        self.tag = tag
        self.turn_s = turn_s
        self.stored = list(stored_boxes(readers))
        self.items = [
            (want, number)
            for want in wants
            for number, (box, _) in enumerate(want.targets)
            if not box.is_empty
        ]
        self.wants_by_key = {want.key: want for want, _ in reversed(self.items)}
        self.placed: defaultdict[int, list[Placed]] = defaultdict(list)
        self.compared: dict[int, Digested] = {}
        self.nbytes_read = 0

    def place_own(self) -> list[int]:
        """Place what this rank's own shards hold; return the items that they do not.

        For a world of the same size and boxes: each item either lies in the shard
        that this rank reads, or comes from another rank.
        """
        by_key: defaultdict[tuple[str, int | None], list[StoredBox]] = defaultdict(list)
        for stored in self.stored:
            by_key[stored.array.key, stored.source].append(stored)
        wanted: defaultdict[tuple[str, int | None], list[int]] = defaultdict(list)
        for item, (want, _) in enumerate(self.items):
            wanted[want.key, want.source].append(item)
        missing: list[int] = []
        for name, items in wanted.items():
            missing += self.place_array(by_key[name], items)
        return sorted(missing)

    def place_array(
        self, parts: Sequence[StoredBox], items: Sequence[int]
    ) -> list[int]:
        """Place the parts of one array; return those items that they do not fill."""
        boxes = [self.target(item)[0] for item in items]
        hits: defaultdict[int, list[tuple[StoredBox, Hyperslab]]] = defaultdict(list)
        for i, j, both in plan_transfers([one.part.box for one in parts], boxes):
            hits[j].append((parts[i], both))
        missing = []
        for j, item in enumerate(items):
            box, array = self.target(item)
            if first_wrong_index(box, [both for _, both in hits[j]]) is not None:
                missing.append(item)
                continue
            for one, _ in hits[j]:
                self.place(one, one.filling(array, box))
        return missing

    def target(self, item: int) -> tuple[Hyperslab, Array]:
        """Return the box of an item and the array to fill."""
        want, number = self.items[item]
        return want.targets[number]

    def place(self, stored: StoredBox, placed: Placed) -> None:
        """Note who takes the bytes of a stored box."""
        self.placed[stored.reader.record.rank].append(placed)

    def steps(self, *, in_place: bool) -> Steps[None]:
        """Fill all targets, or raise the same error on every rank.

        Parameters
        ----------
        in_place : bool
            World and boxes are as they were saved: what lies in this rank's own
            shard needs no plan, and other ranks hold replicas at most.
        """
        missing = list(range(len(self.items)))
        if in_place:
            missing = yield from self.talk.agree(self.place_own, "plan")
        flag = yield from self.talk.allgather(bytes([bool(missing)]), "plan")
        if in_place and not any(map(any, flag)):
            yield from self.reading(Parcels(0))
        else:
            yield from self.exchanging(missing)

    def reading(self, parcels: Parcels) -> Steps[None]:
        """Read this rank's shards in a thread, while all ranks hear that it goes on."""
        yield from self.talk.work(
            lambda cancelled: self.read(parcels, cancelled),
            PHASE,
            moved=lambda: self.nbytes_read,
        )

    def exchanging(self, items: Sequence[int]) -> Steps[None]:
        """Read, and move what lies in other ranks' shards to where it is wanted."""
        answer = yield from route(
            self.talk, self.stored_items(), self.wanted_items(items)
        )
        parcels = yield from self.talk.agree(lambda: self.parcels(answer), "plan")
        try:
            moving = Redistribution(self.talk, parcels, self.unpack, self.tag)
            yield from moving.around(self.reading(parcels))
        finally:
            parcels.cancelled.set()
        yield from broadcast_in_rounds(self.talk, self.given(answer), self.put)
        yield from require_equal(self.talk, self.digests())

    def stored_items(self) -> list[StoredItem]:
        """Return what this rank announces as a reader."""
        return [
            StoredItem(
                one.array.key,
                number,
                one.source,
                one.array.shape,
                one.part.box.offset,
                one.part.box.shape,
            )
            for number, one in enumerate(self.stored)
        ]

    def wanted_items(self, routed: Sequence[int]) -> list[WantedItem]:
        """Return what this rank asks other ranks for."""
        wanted = []
        for item in routed:
            want, number = self.items[item]
            box, array = want.targets[number]
            wanted.append(
                WantedItem(
                    want.key,
                    item,
                    want.source,
                    box.offset,
                    box.shape,
                    want.block,
                    want.source is None and dtype_name(array.dtype) == want.dtype,
                    want.must_agree,
                )
            )
        return wanted

    def take_places(self, answer: Answer) -> None:
        """Note the offsets that were agreed for blocks."""
        for item, offset in answer.offsets:
            want, number = self.items[item]
            box, array = want.targets[number]
            want.targets[number] = (Hyperslab(offset, box.shape), array)

    def parcels(self, answer: Answer) -> Parcels:
        """Place what goes from this rank's shards to itself and to others."""
        self.take_places(answer)
        for number in answer.compare:
            self.compared[number] = Digested()
            stored = self.stored[number]
            self.place(stored, stored.placed(self.compared[number]))
        for number in answer.broadcast:
            self.fill_own(self.stored[number])
        sendings = answer.sendings()
        others = [s for s in sendings if s.dest != self.talk.rank]
        parcels = Parcels(len({sending.dest for sending in others}))
        for sending in sendings:
            if sending.dest == self.talk.rank:
                want, number = self.items[sending.wanted]
                box, array = want.targets[number]
                stored = self.stored[sending.number]
                self.place(stored, stored.filling(array, box))
        for number, sendings in by_number(others).items():
            stored = self.stored[number]
            take = packing(parcels, sendings)
            boxes = InBoxes(stored.part.box, stored.dtype, take)
            self.place(stored, stored.placed(boxes))
        return parcels

    def fill_own(self, stored: StoredBox) -> None:
        """Place a box that all ranks want: first here, to be broadcast from here."""
        box, array = self.target_of_key(stored.array.key)
        self.place(stored, stored.filling(array, box))

    def target_of_key(self, key: str) -> tuple[Hyperslab, Array]:
        """Return the target of an array that every rank wants whole."""
        return self.wants_by_key[key].targets[0]

    def read(self, parcels: Parcels, cancelled: Event) -> None:
        """Read this rank's shards, each once; runs in a thread of its own."""
        parcels.cancelled = cancelled
        cancelled.wait(self.turn_s)
        for reader in self.readers:
            delivery = Delivery(self.placed[reader.record.rank])

            def deliver(
                offset: int, view: memoryview, delivery: Delivery = delivery
            ) -> None:
                delivery(offset, view)
                self.nbytes_read += len(view)

            spans, check = spans_and_check(
                reader, delivery, self.verify, partial=self.partial
            )
            if not spans:
                continue
            read_shard(
                reader.path,
                nbytes=reader.record.nbytes,
                spans=spans,
                check=check,
                deliver=deliver,
                direct=reads_direct(reader.path, default_direct_io()),
                block_nbytes=read_nbytes_at_once(reader.path),
                cancelled=cancelled,
            )
        parcels.flush()

    def unpack(self, item: int, box: Hyperslab, content: memoryview) -> None:
        """Put a box that another rank sent into the item's array."""
        want, number = self.items[item]
        _put_into(want, number, box, content)

    def put(self, key: str, box: Hyperslab, content: memoryview) -> None:
        """Put a box that another rank broadcast into the array of its key."""
        _put_into(self.wants_by_key[key], 0, box, content)

    def given(self, answer: Answer) -> list[tuple[str, Hyperslab, Array]]:
        """Return the boxes that this rank read for all."""
        given = []
        for number in answer.broadcast:
            key, part = self.stored[number].array.key, self.stored[number].part.box
            box, array = self.target_of_key(key)
            given.append((key, part, array[part.relative_to(box).slices()]))
        return given

    def digests(self) -> Iterator[tuple[str, str]]:
        """Yield key and digest of the per-rank arrays here that everyone takes."""
        for number, digested in self.compared.items():
            yield self.stored[number].array.key, digested.hexdigest()


def _put_into(want: Want, number: int, box: Hyperslab, content: memoryview) -> None:
    target_box, array = want.targets[number]
    elements = np.frombuffer(content, np.uint8).view(parse_dtype(want.dtype))
    array[box.relative_to(target_box).slices()] = elements.reshape(box.shape)
