"""Fills blocks with the bytes of a file, in order, and digests them on the way."""

import hashlib
import threading
from pathlib import Path
from time import perf_counter

from mpickpt.errors import CheckpointError
from mpickpt.format.digest import BlockCrc
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.ring import Ring
from mpickpt.storage.shard_file import DIRECT_ALIGNMENT, ShardFile

# Copy, SHA-256 and CRC-32 go over a chunk while it is in the second-level cache.
CHUNK_NBYTES = 512 << 10

_ZEROS = memoryview(bytes(64 << 10))


class Outflow:
    """Fills the ring's buffers in file order and digests what it fills in."""

    def __init__(
        self,
        file: ShardFile,
        ring: Ring,
        block_nbytes: int,
        cancelled: threading.Event | None,
    ) -> None:
        self.sha256 = hashlib.sha256()
        self.seconds_waiting = 0.0
        self._crc = BlockCrc()
        self._file = file
        self._ring = ring
        self._block_nbytes = block_nbytes
        self._cancelled = cancelled
        # Of the current turn's buffer: how far it is filled and how far digested,
        # and how far it may be filled before it is digested.
        self._filled = self._digested = self._chunk_end = 0
        self._turn = -1
        self._next_block()

    def take(self, view: memoryview) -> None:
        """Append bytes to the file."""
        start = 0
        while start < len(view):
            stop = min(len(view), start + self._chunk_end - self._filled)
            filled = self._filled + stop - start
            self._buffer[self._filled : filled] = view[start:stop]
            self._filled = filled
            if filled == self._chunk_end:
                self._digest()
            start = stop

    def pad_to(self, offset: int) -> None:
        """Append zeros until the file has `offset` bytes."""
        missing = offset - self._turn * self._block_nbytes - self._filled
        if missing < 0:
            raise ValueError("an array is larger than the image of the shard says")
        while missing:
            zeros = _ZEROS[:missing]
            self.take(zeros)
            missing -= len(zeros)

    def table(self) -> bytes:
        """Return the CRC-32 of every block up to here."""
        self._digest()
        return self._crc.table()

    def finish(self) -> None:
        """Write what is left and wait for all writes to end."""
        self._digest()
        offset = self._turn * self._block_nbytes
        aligned = self._filled - self._filled % DIRECT_ALIGNMENT
        self._ring.start(self._turn, offset, aligned)
        self._ring.drain()
        # Alone, because the file cannot go on around the page cache after it.
        rest = self._buffer[aligned : self._filled]
        self._file.write_at(rest, offset + aligned)

    def _digest(self) -> None:
        chunk = self._buffer[self._digested : self._filled]
        self.sha256.update(chunk)
        self._crc.update(chunk)
        self._digested = self._filled
        self._chunk_end = min(self._filled + CHUNK_NBYTES, self._block_nbytes)
        if self._filled == self._block_nbytes:
            self._ring.start(self._turn, self._turn * self._filled, self._filled)
            self._next_block()

    def _next_block(self) -> None:
        stop_if(self._cancelled, self._file.path)
        self._turn += 1
        begin = perf_counter()
        self._buffer = self._ring.buffer(self._turn)
        self.seconds_waiting += perf_counter() - begin
        self._filled = self._digested = 0
        self._chunk_end = min(CHUNK_NBYTES, self._block_nbytes)


def stop_if(cancelled: threading.Event | None, path: Path | RemotePath) -> None:
    """Raise CheckpointError when the event was set."""
    if cancelled is not None and cancelled.is_set():
        raise CheckpointError(f"{path}: cancelled, because another rank failed")
