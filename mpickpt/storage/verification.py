"""Verifies the files of a checkpoint against its manifest; one process, no MPI."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mpickpt.errors import CheckpointError, CorruptShardError, IncompleteCheckpointError
from mpickpt.format.digest import BLOCK_NBYTES, crc32
from mpickpt.format.local_tier import has_layout_here, shards_here
from mpickpt.format.records import LayoutRecord, ShardManifest, ShardRecord
from mpickpt.storage.catalog import is_new, read_manifest, rubbish
from mpickpt.storage.checks import corrupt_shard
from mpickpt.storage.layout_file import verify_layout
from mpickpt.storage.places import OpenFile, Place, PlaceLike
from mpickpt.storage.remote_path import RemotePath, parse_place
from mpickpt.storage.shard_reader import BlockCache, ShardReader

Progress = Callable[[int], None]
Piece = tuple[int, int, int | None]

_MOST_JOBS = 4
_STORE_JOBS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedBlock:
    """A block of a shard whose CRC-32 is not the saved one.

    Attributes
    ----------
    number, start, stop : int
        Its number in the table, and its range of bytes in the file.
    keys : tuple of str
        The arrays that have bytes in it.
    """

    number: int
    start: int
    stop: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """What became of one file.

    Attributes
    ----------
    path : str
        Relative to the checkpoint.
    nbytes : int
        Size that it should have.
    error : CheckpointError or None
        What is wrong with it; None where nothing is.
    blocks : tuple of DamagedBlock
        All damaged blocks, where the table could be read.
    """

    path: str
    nbytes: int
    error: CheckpointError | None = None
    blocks: tuple[DamagedBlock, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What became of a checkpoint.

    Attributes
    ----------
    path : Path or RemotePath
        Directory of the checkpoint.
    manifest : ShardManifest
        Its manifest, which is whole.
    files : tuple of FileReport
        The shards in rank order, then the layout file; on a node's own disk those that
        belong there.
    rubbish : tuple of str
        Files that a crashed save left; harmless.
    """

    path: Place
    manifest: ShardManifest
    files: tuple[FileReport, ...]
    rubbish: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every file is as it was saved."""
        return not self.failures

    @property
    def failures(self) -> tuple[FileReport, ...]:
        """The files that are not."""
        return tuple(file for file in self.files if file.error is not None)


def verify_checkpoint(
    path: PlaceLike,
    *,
    fast: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read every byte of a checkpoint and compare it with the digests.

    Parameters
    ----------
    path : path-like or URL
        Directory of one checkpoint, or its URL in a store.
    fast : bool
        Only the CRC-32 of each block, not the SHA-256 of each file.
    jobs : int, optional
        Files that are read at the same time; by default up to 4, of a store 8.
    progress : callable, optional
        Called with a number of bytes when these were verified, from several threads.

    Returns
    -------
    VerifyReport
        It never stops at the first damage.

    Raises
    ------
    CheckpointNotFoundError
        If no checkpoint was published there, or it was deleted meanwhile.
    ManifestError
        If the manifest is damaged: nothing else can be verified then.
    StorageError
        If the manifest or the directory cannot be read.
    """
    while True:
        manifest = read_manifest(path)
        report = _verified(parse_place(path), manifest, fast, jobs, progress)
        if not any(_is_incomplete(file) for file in report.files):
            return report
        # A save with `overwrite` may have taken the old shards away meanwhile.
        if read_manifest(path).checkpoint_id == manifest.checkpoint_id:
            return report


def _verified(
    directory: Place,
    manifest: ShardManifest,
    fast: bool,
    jobs: int | None,
    progress: Progress | None,
) -> VerifyReport:
    def verified_shard(record: ShardRecord) -> FileReport:
        reader = ShardReader(
            directory,
            record,
            manifest.world_size,
            BlockCache(0),
            is_new=is_new(manifest),
        )
        scan = _Scan(reader, progress or _ignored, stop, fast=fast)
        return scan.report()

    stop = threading.Event()
    with _threads(jobs or _usual_jobs(directory), stop) as threads:
        files = list(threads.map(verified_shard, shards_here(manifest)))
    if manifest.layout is not None and has_layout_here(manifest):
        files.append(_verified_layout(directory, manifest.layout))
    return VerifyReport(
        path=directory,
        manifest=manifest,
        files=tuple(files),
        rubbish=tuple(rubbish(directory, manifest)),
    )


class _Scan:
    """Reads one shard from its start to its end."""

    def __init__(
        self,
        reader: ShardReader,
        progress: Progress,
        stop: threading.Event,
        *,
        fast: bool,
    ) -> None:
        self._reader = reader
        self._progress = progress
        self._stop = stop
        self._sha256 = None if fast else hashlib.sha256()
        self._damage: list[tuple[DamagedBlock, CorruptShardError]] = []
        self._table: tuple[int, ...] = ()

    def report(self) -> FileReport:
        """Return what became of the shard."""
        record = self._reader.record
        error: CheckpointError | None = None
        try:
            self._scan()
        except CheckpointError as failure:
            error = failure
        if self._damage:
            error = self._damage[0][1]
        return FileReport(
            path=record.path,
            nbytes=record.nbytes,
            error=error,
            blocks=tuple(block for block, _ in self._damage),
        )

    def _scan(self) -> None:
        reader = self._reader
        self._table = reader.table
        pieces = _pieces(reader)
        buffer = memoryview(bytearray(min(BLOCK_NBYTES, reader.record.nbytes)))
        with reader.open() as file:
            for start, stop, number in pieces:
                if self._stop.is_set():
                    return
                self._scan_piece(file, buffer[: stop - start], start, number)
        if self._sha256 is not None and not self._damage:
            actual, expected = self._sha256.hexdigest(), reader.record.sha256
            if actual != expected:
                raise corrupt_shard(reader.path, "the file", expected, actual)

    def _scan_piece(
        self, file: OpenFile, view: memoryview, start: int, number: int | None
    ) -> None:
        file.read_at(view, start)
        if self._sha256 is not None:
            self._sha256.update(view)
        if number is not None:
            actual = crc32(view)
            if actual != self._table[number]:
                self._note(number, actual)
        self._progress(len(view))

    def _note(self, number: int, actual: int) -> None:
        start, stop = self._reader.block_range(number)
        keys = self._reader.keys_in(start, stop)
        block = DamagedBlock(number=number, start=start, stop=stop, keys=keys)
        self._damage.append((block, self._reader.corrupt_block(number, actual)))


def _pieces(reader: ShardReader) -> Iterator[Piece]:
    """Yield (start, stop, block number) that tile the shard; the table has none."""
    table_start, table_nbytes = reader.index.table
    table = (table_start, table_start + table_nbytes)
    number, place = 0, 0
    while place < reader.record.nbytes:
        if place == table[0] < table[1]:
            for start in range(*table, BLOCK_NBYTES):
                yield start, min(start + BLOCK_NBYTES, table[1]), None
            place = table[1]
        else:
            start, place = reader.block_range(number)
            yield start, place, number
            number += 1


def _verified_layout(directory: Place, record: LayoutRecord) -> FileReport:
    error: CheckpointError | None = None
    try:
        verify_layout(directory, record)
    except CheckpointError as failure:
        error = failure
    return FileReport(path=record.path, nbytes=record.nbytes, error=error)


def _usual_jobs(directory: Place) -> int:
    # Whoever reads a store waits for the network more than for a processor.
    if isinstance(directory, RemotePath):
        return _STORE_JOBS
    return min(_MOST_JOBS, os.cpu_count() or 1)


@contextmanager
def _threads(count: int, stop: threading.Event) -> Iterator[Any]:
    threads = ThreadPoolExecutor(count)
    try:
        yield threads
    except BaseException:
        # Ctrl-C: the threads end at their next block, not at the end of their shard.
        stop.set()
        raise
    finally:
        threads.shutdown(cancel_futures=True)


def _is_incomplete(file: FileReport) -> bool:
    return isinstance(file.error, IncompleteCheckpointError)


def _ignored(nbytes: int) -> None:
    pass
