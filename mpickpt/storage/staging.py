"""Holds a copy of a shard in memory, as it is going to lie in the file, and writes it.

The program waits for one copy of its state and goes on. What is written in the
background comes straight out of the copy, which is kept and reused from save to save.
"""

import hashlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy as np

from mpickpt.format.digest import BlockCrc, crc32, crc32_hex
from mpickpt.format.dtypes import clear_padding
from mpickpt.state import StreamedArray
from mpickpt.storage.commit import sync_file
from mpickpt.storage.large_memory import allocate
from mpickpt.storage.regions import Array, bytes_after_table, streamed
from mpickpt.storage.shard_draft import ShardDraft, ShardLayout
from mpickpt.storage.shard_file import ShardFile, new_shard_file
from mpickpt.storage.stream import ShardDigest, stop_if, table_of

_CHUNK_NBYTES = 512 << 10
_WRITES_IN_FLIGHT = 2
_NICENESS = 10


class Staging:
    """Memory for one shard, kept from save to save.

    Notes
    -----
    Holds one shard at a time. Not thread-safe.
    """

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._layout: ShardLayout | None = None

    def hold(self, draft: ShardDraft) -> "StagedShard":
        """Copy a shard; the arrays may change as soon as this returns.

        Raises
        ------
        MemoryError
            There is no room for a copy.
        """
        nbytes = draft.layout.image.nbytes
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = self._layout = None  # never both at once
            self._memory = _allocate(nbytes)
        view = self._memory[:nbytes]
        if self._layout is not draft.layout:
            _lay_out(view, draft.layout, is_fresh=self._layout is None)
            self._layout = draft.layout
        _copy_state(view, draft)
        return StagedShard(view, draft)


class StagedShard:
    """A shard that lies in memory as it is going to lie in the file."""

    def __init__(self, view: memoryview, draft: ShardDraft) -> None:
        self._view = view
        self._image = draft.layout.image
        self._index_crc32 = crc32_hex(crc32(draft.index))

    @property
    def content(self) -> memoryview:
        """The bytes of the file, all of them once it is written."""
        return self._view

    def write(
        self,
        path: Path,
        *,
        block_nbytes: int,
        direct: bool,
        cancelled: threading.Event | None = None,
    ) -> ShardDigest:
        """Write the shard to a new file, durably but for its name.

        Raises
        ------
        StorageError
            If the file system refuses; the file was removed.
        CheckpointError
            If it was cancelled; the file was removed.
        """
        begin = perf_counter()
        digests = _Digests(self._view, self._image.table_offset)
        with new_shard_file(path, nbytes=len(self._view), direct=direct) as file:
            with ThreadPoolExecutor(_WRITES_IN_FLIGHT, initializer=yield_cpu) as pool:
                writes = _Writes(pool, file)
                for start in range(0, len(self._view), block_nbytes):
                    stop_if(cancelled, path)
                    stop = min(start + block_nbytes, len(self._view))
                    digests.go_on(stop, self._fill_table)
                    writes.begin(self._view[start:stop], start)
                writes.finish()
            written = perf_counter()
            sync_file(file.descriptor, path)
        end = perf_counter()
        return ShardDigest(
            nbytes=len(self._view),
            sha256=digests.sha256.hexdigest(),
            crc32=crc32_hex(crc32(self._table)),
            index_crc32=self._index_crc32,
            seconds=end - begin,
            seconds_waiting=writes.seconds_waiting,
            seconds_syncing=end - written,
        )

    def _fill_table(self, before: bytes) -> None:
        """Put the table in its place: the blocks before it, and those behind."""
        image = self._image
        self._table = before + table_of(bytes_after_table(image))
        stop = image.table_offset + image.table_nbytes
        self._view[image.table_offset : stop] = self._table


class _Digests:
    """Digests the file in order; knows when the table can be filled in."""

    def __init__(self, view: memoryview, table_offset: int) -> None:
        self.sha256 = hashlib.sha256()
        self._crc = BlockCrc()
        self._view = view
        self._table_offset = table_offset
        self._done = 0
        self._has_table = False

    def go_on(self, stop: int, fill_table: Callable[[bytes], None]) -> None:
        """Digest up to `stop`; the table is filled in on the way."""
        if stop > self._table_offset and not self._has_table:
            self._take(self._table_offset)
            fill_table(self._crc.table())
            self._has_table = True
        self._take(stop)

    def _take(self, stop: int) -> None:
        while self._done < stop:
            end = min(self._done + _CHUNK_NBYTES, stop)
            chunk = self._view[self._done : end]
            self.sha256.update(chunk)
            if not self._has_table:
                self._crc.update(chunk)
            self._done = end


class _Writes:
    """Keeps a few writes under way."""

    def __init__(self, pool: ThreadPoolExecutor, file: ShardFile) -> None:
        self.seconds_waiting = 0.0
        self._pool = pool
        self._file = file
        self._pending: deque[Future[None]] = deque()

    def begin(self, view: memoryview, offset: int) -> None:
        """Begin to write a block; wait while too many are under way."""
        if len(view) % mmap.PAGESIZE:
            self.finish()  # the end of the file, which leaves direct I/O
        self._pending.append(self._pool.submit(self._file.write_at, view, offset))
        while len(self._pending) > _WRITES_IN_FLIGHT:
            self._wait()

    def finish(self) -> None:
        """Wait until all is written."""
        while self._pending:
            self._wait()

    def _wait(self) -> None:
        begin = perf_counter()
        self._pending.popleft().result()
        self.seconds_waiting += perf_counter() - begin


def yield_cpu() -> None:
    """Let the calling thread yield to the program's own, where the system can.

    ``MPICKPT_NICE`` says by how much, 0 not at all; a text that is no number is as if
    it were not there.
    """
    niceness = _NICENESS
    with suppress(ValueError):
        niceness = int(os.environ.get("MPICKPT_NICE", ""))
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _allocate(nbytes: int) -> memoryview:
    try:
        return allocate(nbytes)
    except MemoryError as error:
        raise MemoryError(
            f"no memory for a copy of {nbytes} bytes; a save that is not asynchronous "
            "needs none"
        ) from error


def _lay_out(view: memoryview, layout: ShardLayout, *, is_fresh: bool) -> None:
    if not is_fresh:  # what another layout left behind must not show between arrays
        np.frombuffer(view, np.uint8).fill(0)
    for offset, content in layout.image.static:
        view[offset : offset + len(content)] = content


def _copy_state(view: memoryview, draft: ShardDraft) -> None:
    image = draft.layout.image
    view[image.index_offset : image.index_offset + len(draft.index)] = draft.index
    for offset, part in zip(image.part_offsets, draft.parts, strict=True):
        if offset is not None:
            _copy_array(view, offset, part)


def _copy_array(view: memoryview, offset: int, part: Array | StreamedArray) -> None:
    copy = np.ndarray(part.shape, part.dtype, view, offset)
    if isinstance(part, StreamedArray):
        for box, piece in streamed(part):
            copy[box.slices()] = piece
    else:
        copy[...] = part
    if part.dtype.char in "gG":
        content = np.frombuffer(view, np.uint8, part.nbytes, offset)
        clear_padding(content, part.dtype)
