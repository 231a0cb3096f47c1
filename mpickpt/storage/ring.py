"""Moves blocks between a ring of buffers and a file in threads of its own.

While threads transfer some blocks, the caller fills or digests another. Everything
that takes long releases the GIL: pread, pwrite, SHA-256, CRC-32.
"""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter, sleep
from types import TracebackType
from typing import Self

from mpickpt.planning.blocks import MAX_BLOCK_NBYTES
from mpickpt.storage.large_memory import allocate
from mpickpt.storage.shard_file import DIRECT_ALIGNMENT

Transfer = Callable[[memoryview, int], None]

# A small ring stays in the last-level cache; measured, 32 MiB cost a tenth of the
# speed.
_RING_NBYTES = 32 << 20
_MAX_DEPTH = 4
_AWAKE_S = 5e-3


class Ring:
    """Buffers in a circle; turn `n` of the caller is with buffer `n % depth`.

    Parameters
    ----------
    transfer : callable
        Moves all of a buffer to or from a file offset; called in the threads.
    block_nbytes : int
        Size of a buffer, a multiple of the page size.
    depth : int
        Number of buffers.
    in_flight : int
        Number of threads, hence of transfers at one time.

    Notes
    -----
    To be used as a context manager: however the body ends, transfers that have not
    begun are dropped and the threads have ended when it is left.
    """

    def __init__(
        self, transfer: Transfer, *, block_nbytes: int, depth: int, in_flight: int
    ) -> None:
        self.depth = depth
        self._transfer = transfer
        self._buffers = _buffers(block_nbytes, depth)
        self._jobs: SimpleQueue[tuple[int, int, int] | None] = SimpleQueue()
        self._ended: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(depth)]
        self._is_busy = [False] * depth
        self._failure: BaseException | None = None
        self._threads = [
            Thread(target=self._serve, name=f"mpickpt-ring-{n}", daemon=True)
            for n in range(in_flight)
        ]

    def start(self, turn: int, offset: int, nbytes: int) -> None:
        """Have the first `nbytes` of the turn's buffer moved to or from `offset`."""
        slot = turn % self.depth
        self._is_busy[slot] = True
        self._jobs.put((slot, offset, nbytes))

    def buffer(self, turn: int) -> memoryview:
        """Return the turn's buffer once its transfer, if it has one, has ended.

        Whatever a transfer raised, of this buffer or of another, is raised here.
        """
        slot = turn % self.depth
        if self._is_busy[slot]:
            _take(self._ended[slot])
            self._is_busy[slot] = False
        if self._failure is not None:
            raise self._failure
        return self._buffers[slot]

    def drain(self) -> None:
        """Wait until every transfer has ended; raise what one of them raised."""
        for slot in range(self.depth):
            self.buffer(slot)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._failure = self._failure or error
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            slot, offset, nbytes = job
            try:
                if self._failure is None:
                    self._transfer(self._buffers[slot][:nbytes], offset)
            except BaseException as error:
                self._failure = self._failure or error
            self._ended[slot].put(None)


def _take(ended: SimpleQueue[None]) -> None:
    """Wait for the end of a transfer: awake for as long as one takes, then asleep.

    A processor that went to sleep wakes late, and the disk idles meanwhile: measured
    in a virtual machine, a save whose caller slept here took a sixth longer.
    """
    end = perf_counter() + _AWAKE_S
    while perf_counter() < end:
        with suppress(Empty):
            return ended.get_nowait()
        sleep(0)  # lets the other threads of this process run
    ended.get()


def ring_of(transfer: Transfer, block_nbytes: int, in_flight: int) -> Ring:
    """Return a ring of bounded memory with up to `in_flight` transfers at a time."""
    if not 0 < block_nbytes <= MAX_BLOCK_NBYTES or block_nbytes % DIRECT_ALIGNMENT:
        raise ValueError(
            f"block_nbytes must be a multiple of {DIRECT_ALIGNMENT} up to "
            f"{MAX_BLOCK_NBYTES}, not {block_nbytes}"
        )
    depth = max(2, min(_MAX_DEPTH, _RING_NBYTES // block_nbytes))
    return Ring(
        transfer,
        block_nbytes=block_nbytes,
        depth=depth,
        in_flight=min(in_flight, depth - 1),
    )


def _buffers(block_nbytes: int, count: int) -> list[memoryview]:
    whole = allocate(block_nbytes * count, stays=False)
    return [whole[n * block_nbytes : (n + 1) * block_nbytes] for n in range(count)]
