"""Measures how fast one process writes to a directory, durably, and reads from it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from mpickpt.format.naming import TMP_SUFFIX
from mpickpt.planning.blocks import DEFAULT_BLOCK_NBYTES
from mpickpt.planning.probed import SpeedFound
from mpickpt.storage.commit import discard, storage_errors, sync_file
from mpickpt.storage.filesystem import file_system_of, wants_direct
from mpickpt.storage.ring import ring_of
from mpickpt.storage.shard_file import new_shard_file, open_shard_file

_NBYTES = 256 << 20
_BLOCK_NBYTES = DEFAULT_BLOCK_NBYTES
_IN_FLIGHT = 3


def measured_write_bps(directory: Path, nbytes: int = _NBYTES) -> float:
    """Write a file as shards are written, sync and remove it; return bytes a second.

    Raises
    ------
    StorageError
        The file system refused; nothing stays.
    """
    with _written(directory, nbytes) as (_, bps):
        return bps


def measured_speed(directory: Path, nbytes: int = _NBYTES) -> SpeedFound:
    """Write a file as `measured_write_bps` does, then read it as shards are read.

    Before it is read this node's page cache is told to forget it; what a server or a
    disk remembers is not.

    Raises
    ------
    StorageError
        The file system refused; nothing stays.
    """
    with _written(directory, nbytes) as (path, write_bps):
        _forget_pages(path)
        begin = perf_counter()
        read_nbytes = _read(path)
        read_bps = read_nbytes / (perf_counter() - begin)
    return SpeedFound(nbytes=read_nbytes, write_bps=write_bps, read_bps=read_bps)


@contextmanager
def _written(directory: Path, nbytes: int) -> Iterator[tuple[Path, float]]:
    """Yield a file of at least a block, and how fast it was written."""
    path = directory / f"speed-{secrets.token_hex(4)}{TMP_SUFFIX}"
    nbytes = max(_BLOCK_NBYTES, nbytes - nbytes % _BLOCK_NBYTES)
    begin = perf_counter()
    _write(path, nbytes)
    bps = nbytes / (perf_counter() - begin)
    try:
        yield path, bps
    finally:
        discard(path)


def _write(path: Path, nbytes: int) -> None:
    direct = wants_direct(file_system_of(path), "auto")
    with new_shard_file(path, nbytes=nbytes, direct=direct) as file:
        with ring_of(file.write_at, _BLOCK_NBYTES, _IN_FLIGHT) as ring:
            for turn, offset in enumerate(range(0, nbytes, _BLOCK_NBYTES)):
                # No two blocks alike, lest a file system store one of them.
                buffer = ring.buffer(turn)
                buffer[:4096] = secrets.token_bytes(4096)
                ring.start(turn, offset, _BLOCK_NBYTES)
            ring.drain()
        sync_file(file.descriptor, path)


def _read(path: Path) -> int:
    direct = wants_direct(file_system_of(path), "auto")
    with open_shard_file(path, direct=direct) as file:
        with ring_of(file.read_at, _BLOCK_NBYTES, _IN_FLIGHT) as ring:
            for turn, offset in enumerate(range(0, file.nbytes, _BLOCK_NBYTES)):
                ring.buffer(turn)
                ring.start(turn, offset, _BLOCK_NBYTES)
            ring.drain()
        return file.nbytes


def _forget_pages(path: Path) -> None:
    with storage_errors("open", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with storage_errors("drop the cached pages of", path):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
