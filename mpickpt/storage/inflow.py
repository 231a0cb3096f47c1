"""Carries what was read, in file order, to a ring of buffers that are written."""

from mpickpt.storage.copy_target import CopyControl
from mpickpt.storage.ring import Ring
from mpickpt.storage.shard_file import DIRECT_ALIGNMENT, ShardFile


class Inflow:
    """Fills the ring's buffers in file order with bytes that others have digested."""

    def __init__(
        self, file: ShardFile, ring: Ring, block_nbytes: int, control: CopyControl
    ) -> None:
        self._file = file
        self._ring = ring
        self._block_nbytes = block_nbytes
        self._control = control
        self._turn = 0
        self._filled = 0
        self._buffer = ring.buffer(0)

    def take(self, offset: int, view: memoryview) -> None:
        """Append the bytes at an offset, which follow those of before."""
        self._control.moved(len(view), self._file.path)
        while view:
            part = view[: self._block_nbytes - self._filled]
            filled = self._filled + len(part)
            self._buffer[self._filled : filled] = part
            self._filled = filled
            view = view[len(part) :]
            if filled == self._block_nbytes:
                self._ring.start(self._turn, self._turn * filled, filled)
                self._turn += 1
                self._filled = 0
                self._buffer = self._ring.buffer(self._turn)

    def finish(self) -> None:
        """Write what is left and wait for all writes to end."""
        offset = self._turn * self._block_nbytes
        aligned = self._filled - self._filled % DIRECT_ALIGNMENT
        self._ring.start(self._turn, offset, aligned)
        self._ring.drain()
        # Alone, because the file cannot go on around the page cache after it.
        self._file.write_at(self._buffer[aligned : self._filled], offset + aligned)
