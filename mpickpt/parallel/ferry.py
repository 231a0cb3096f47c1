"""Carries pieces of files between ranks, in messages of bounded memory.

Threads read and write the files. The calling thread sends the pieces that were read
and receives those of others. Sends are synchronous: a buffer comes free when its
message was received, and none is received that nobody has room for, so slow disks and
slow networks alone set the pace.
"""

import queue
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpickpt.errors import CheckpointError
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.messages import Received
from mpickpt.parallel.waiting import Steps, beside

PIECE_NBYTES = 2 << 20

PHASE = "move files between nodes"

Buffer = np.ndarray[Any, Any]

_HEAD = struct.Struct("<qqqq")  # passage, offset, bytes, kind
_BUFFERS = 8  # that are being filled and sent, and as many that are being received
_LOOK_EVERY_S = 0.1

_MORE, _END, _BROKEN = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one message holds.

    Attributes
    ----------
    passage : int
        Number of the file's passage.
    offset : int
        Where the content goes in the file.
    content : memoryview
        Bytes of it; valid until the piece is given back.
    is_last : bool
        Whether the file ends here.
    failure : str or None
        Why the sender cannot go on.
    """

    passage: int
    offset: int
    content: memoryview
    is_last: bool
    failure: str | None
    buffer: Buffer


class Ferry:
    """One rank's side of it.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    tag : int
        Of these messages alone.

    Attributes
    ----------
    n_moved : int
        Counts what the threads have moved to or from files.
    """

    def __init__(self, talk: Conversation, tag: int) -> None:
        self.n_moved = 0
        self._talk = talk
        self._tag = tag
        self._n_buffers = 0
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[int, Buffer, int]] = queue.SimpleQueue()
        self._spare: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._n_spare = 0
        self._waiting: Buffer | None = None
        self._sending: list[tuple[Any, Buffer]] = []
        self._receiving: deque[tuple[Received, Buffer]] = deque()
        self._dropped = False

    # For the threads.

    def buffer(self, cancelled: threading.Event) -> Buffer:
        """Return a buffer to fill; waits while all are under way."""
        if self._n_buffers < _BUFFERS and self._free.empty():
            self._n_buffers += 1
            return _new_buffer()
        return _taken(self._free, cancelled)

    @staticmethod
    def room_in(buffer: Buffer, nbytes: int) -> memoryview:
        """Return where in a buffer the content of a piece goes."""
        return buffer.data[_HEAD.size : _HEAD.size + nbytes]

    def ship(
        self, buffer: Buffer, dest: int, passage: int, offset: int, nbytes: int
    ) -> None:
        """Send a buffer that was filled."""
        self._put(buffer, dest, (passage, offset, nbytes, _MORE))
        self.n_moved += 1

    def ship_end(
        self, buffer: Buffer, dest: int, passage: int, failure: str | None
    ) -> None:
        """Tell that a file ends, or why it cannot be sent."""
        text = (failure or "").encode("utf-8", "replace")[:PIECE_NBYTES]
        self.room_in(buffer, len(text))[:] = text
        kind = _END if failure is None else _BROKEN
        self._put(buffer, dest, (passage, 0, len(text), kind))

    def next_piece(self, cancelled: threading.Event) -> Piece:
        """Return the next piece that arrived; waits for it."""
        buffer = _taken(self._arrived, cancelled)
        passage, offset, nbytes, kind = _HEAD.unpack_from(buffer.data)
        content = self.room_in(buffer, nbytes)
        return Piece(
            passage=passage,
            offset=offset,
            content=content,
            is_last=kind != _MORE,
            failure=str(content, "utf-8", "replace") if kind == _BROKEN else None,
            buffer=buffer,
        )

    def give_back(self, piece: Piece) -> None:
        """Let another piece arrive in the buffer of one."""
        self.n_moved += 1
        self._spare.put(piece.buffer)

    # For the calling thread.

    def around(self, steps: Steps[Any]) -> Steps[Any]:
        """Drive the steps that wait for the threads, and carry pieces meanwhile.

        An error of them is raised after all messages have ended: none stays behind.
        """
        try:
            found = yield from beside(steps, self._move)
        except Exception:
            if self._talk.broken:
                raise
            self._dropped = True
            yield from self._ended()
            raise
        yield from self._ended()
        return found

    def _ended(self) -> Steps[None]:
        patience = self._talk.patience(PHASE)
        while self._sending or not self._full.empty():
            if self._move():
                patience.progressed()
            patience.check()
            yield None
        yield from beside(self._talk.allgather(b"\0", PHASE), self._move)
        self._move()
        while self._receiving:
            self._move()
            patience.check()
            yield None

    def _move(self) -> bool:
        with self._talk.translated(PHASE):
            moved = self._send_full()
            moved |= self._recycle()
            moved |= self._receive()
            return self._hand_over() or moved

    def _send_full(self) -> bool:
        moved = False
        while not self._full.empty():
            dest, buffer, used = self._full.get()
            if self._dropped:
                self._free.put(buffer)
            else:
                transfer = self._talk.send(buffer[:used], dest, self._tag)
                self._sending.append((transfer, buffer))
            moved = True
        return moved

    def _recycle(self) -> bool:
        still = []
        for transfer, buffer in self._sending:
            if transfer.done():
                self._free.put(buffer)
            else:
                still.append((transfer, buffer))
        moved = len(still) != len(self._sending)
        self._sending = still
        return moved

    def _receive(self) -> bool:
        moved = False
        while (buffer := self._buffer_to_receive()) is not None:
            received = self._talk.receive(buffer, self._tag)
            if received is None:
                self._waiting = buffer
                return moved
            self._receiving.append((received, buffer))
            moved = True
        return moved

    def _buffer_to_receive(self) -> Buffer | None:
        if self._waiting is not None:
            buffer, self._waiting = self._waiting, None
            return buffer
        if self._dropped and not self._arrived.empty():
            return self._arrived.get()
        if not self._spare.empty():
            return self._spare.get()
        if self._n_spare < _BUFFERS:
            self._n_spare += 1
            return _new_buffer()
        return None

    def _hand_over(self) -> bool:
        moved = False
        # In the order of arrival: a file is digested from its start to its end.
        while self._receiving and self._receiving[0][0].done():
            self._arrived.put(self._receiving.popleft()[1])
            moved = True
        return moved

    def _put(self, buffer: Buffer, dest: int, head: tuple[int, int, int, int]) -> None:
        _HEAD.pack_into(buffer.data, 0, *head)
        self._full.put((dest, buffer, _HEAD.size + head[2]))


class Activity:
    """Tells whether threads move something, or wait for what other ranks do.

    Parameters
    ----------
    ferry : Ferry
        Counts what is moved.
    """

    def __init__(self, ferry: Ferry) -> None:
        self._ferry = ferry
        self._n_busy = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._n_busy += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._n_busy -= 1

    def moved(self) -> tuple[int, float]:
        """Return what stays the same only while a file system does not answer."""
        return self._ferry.n_moved, 0.0 if self._n_busy else time.monotonic()


def _new_buffer() -> Buffer:
    return np.empty(_HEAD.size + PIECE_NBYTES, np.uint8)


def _taken(buffers: "queue.SimpleQueue[Buffer]", cancelled: threading.Event) -> Buffer:
    while True:
        try:
            return buffers.get(timeout=_LOOK_EVERY_S)
        except queue.Empty:
            if cancelled.is_set():
                raise CheckpointError("the transfer of files was cancelled") from None
