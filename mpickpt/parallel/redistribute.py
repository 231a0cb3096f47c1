"""Moves boxes between ranks while shards are read, in messages of bounded memory.

A thread reads and verifies the shards and packs small boxes into parcels, one open
parcel a destination. The calling thread sends full parcels, receives those of others
and puts their boxes in place. Sends are synchronous: a parcel's buffer comes free when
it was received, which alone throttles the readers. All is over when every rank has
nothing left to send.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mpickpt.format.hyperslab import Hyperslab
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.parcels import LARGEST_PARCEL, Parcels, boxes_in
from mpickpt.parallel.waiting import Steps, beside

PHASE = "redistribute"

Array = np.ndarray[Any, Any]
Unpack = Callable[[int, Hyperslab, memoryview], None]

_INCOMING = 8


class Redistribution:
    """The calling thread's side: sends parcels, receives and unpacks those of others.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    parcels : Parcels
        Filled by the reading thread.
    unpack : callable
        Puts a box into the item's array: item, box, bytes of its elements.
    tag : int
        Of this load alone.
    """

    def __init__(
        self, talk: Conversation, parcels: Parcels, unpack: Unpack, tag: int
    ) -> None:
        self.talk = talk
        self.parcels = parcels
        self.unpack = unpack
        self.tag = tag
        self.nbytes_received = 0
        self._sending: list[tuple[Any, Array]] = []
        self._receiving: list[tuple[Any, Array]] = []
        self._spare = [np.empty(0, np.uint8) for _ in range(_INCOMING)]
        self._dropped = False
        self._failure: Exception | None = None

    def around(self, steps: Steps[Any]) -> Steps[None]:
        """Drive the reading, and move parcels until no rank has any left.

        An error of the reading is raised on every rank, after all transfers have
        ended: no message of this load stays behind.
        """
        failure = None
        try:
            yield from beside(steps, self._move)
        except Exception as error:
            if self.talk.broken:
                raise
            failure = error
            self._dropped = True
        yield from self._until_sent()
        yield from beside(self.talk.allgather(b"\0", PHASE), self._move)
        yield from self._until_received()
        if failure is not None:
            raise failure
        yield from self.talk.settle(self._failure, PHASE)

    def _until_sent(self) -> Steps[None]:
        patience = self.talk.patience(PHASE)
        while self._sending or not self.parcels.full.empty():
            if self._move():
                patience.progressed()
            patience.check()
            yield None
        self._move()

    def _until_received(self) -> Steps[None]:
        patience = self.talk.patience(PHASE)
        while self._receiving:
            self._move()
            patience.check()
            yield None

    def _move(self) -> bool:
        """Send, receive and unpack whatever is ready; tell whether anything was."""
        with self.talk.translated(PHASE):
            moved = self._send_full()
            moved |= self._recycle()
            moved |= self._receive()
            return self._unpack_arrived() or moved

    def _send_full(self) -> bool:
        moved = False
        while not self.parcels.full.empty():
            dest, parcel, used = self.parcels.full.get()
            if self._dropped:
                self.parcels.give_back(parcel)
            else:
                transfer = self.talk.send(parcel[:used], dest, self.tag)
                self._sending.append((transfer, parcel))
            moved = True
        return moved

    def _recycle(self) -> bool:
        before = len(self._sending)
        still = []
        for transfer, parcel in self._sending:
            if transfer.done():
                self.parcels.give_back(parcel)
            else:
                still.append((transfer, parcel))
        self._sending = still
        return len(still) != before

    def _receive(self) -> bool:
        moved = False
        while self._spare:
            buffer = self._spare[-1]
            if buffer.size == 0:
                buffer = self._spare[-1] = np.empty(LARGEST_PARCEL, np.uint8)
            received = self.talk.receive(buffer, self.tag)
            if received is None:
                return moved
            self._receiving.append((received, self._spare.pop()))
            moved = True
        return moved

    def _unpack_arrived(self) -> bool:
        still = []
        for received, buffer in self._receiving:
            if not received.done():
                still.append((received, buffer))
                continue
            self.nbytes_received += received.nbytes
            self._try_unpack(buffer.data[: received.nbytes])
            self._spare.append(buffer)
        moved = len(still) != len(self._receiving)
        self._receiving = still
        return moved

    def _try_unpack(self, parcel: memoryview) -> None:
        if self._dropped or self._failure is not None:
            return
        try:
            for item, box, content in boxes_in(parcel):
                self.unpack(item, box, content)
        except Exception as failure:  # agreed on once all transfers have ended
            self._failure = failure
