"""Measures how fast one process writes to a directory, durably."""

import secrets
from pathlib import Path
from time import perf_counter

from mpickpt.format.naming import TMP_SUFFIX
from mpickpt.storage.commit import discard, sync_file
from mpickpt.storage.filesystem import wants_direct
from mpickpt.storage.ring import ring_of
from mpickpt.storage.shard_file import new_shard_file
from mpickpt.storage.stream import DEFAULT_BLOCK_NBYTES

_NBYTES = 256 << 20
_IN_FLIGHT = 3


def measured_write_bps(directory: Path, nbytes: int = _NBYTES) -> float:
    """Write a file as shards are written, sync and remove it; return bytes a second.

    Raises
    ------
    StorageError
        The file system refused; nothing stays.
    """
    path = directory / f"speed-{secrets.token_hex(4)}{TMP_SUFFIX}"
    block_nbytes = DEFAULT_BLOCK_NBYTES
    nbytes -= nbytes % block_nbytes
    direct = wants_direct(directory, "auto")
    begin = perf_counter()
    with new_shard_file(path, nbytes=nbytes, direct=direct) as file:
        with ring_of(file.write_at, block_nbytes, _IN_FLIGHT) as ring:
            for turn, offset in enumerate(range(0, nbytes, block_nbytes)):
                # No two blocks alike, lest a file system store one of them.
                buffer = ring.buffer(turn)
                buffer[:4096] = secrets.token_bytes(4096)
                ring.start(turn, offset, block_nbytes)
            ring.drain()
        sync_file(file.descriptor, path)
    seconds = perf_counter() - begin
    discard(path)
    return nbytes / seconds
