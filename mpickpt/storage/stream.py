"""Writes and reads shards in one pass, digesting on the way; knows files, not MPI.

The bytes of a shard go in file order through a small ring of buffers. The calling
thread copies them and digests them while they are in its cache; other threads move
full buffers to the file. Nothing is read back, and HDF5 takes no part.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from mpickpt.format.digest import BlockCrc, crc32, crc32_hex
from mpickpt.planning.blocks import DEFAULT_BLOCK_NBYTES
from mpickpt.state import StreamedArray
from mpickpt.storage.checks import (
    BlockCrc32,
    Check,
    NoCheck,
    Span,
    WholeFileSha256,
    corrupt_shard,
)
from mpickpt.storage.commit import sync_file
from mpickpt.storage.outflow import CHUNK_NBYTES, Outflow, stop_if
from mpickpt.storage.places import OpenFile, Place, open_to_read
from mpickpt.storage.regions import (
    Array,
    bytes_after_table,
    joined,
    pieces_of,
    regions_before_table,
)
from mpickpt.storage.ring import ring_of
from mpickpt.storage.shard_file import DIRECT_ALIGNMENT, new_shard_file, wrong_size

if TYPE_CHECKING:
    from mpickpt.storage.shard_image import ShardImage

__all__ = [
    "BlockCrc32",
    "NoCheck",
    "ShardDigest",
    "WholeFileSha256",
    "read_shard",
    "read_verified",
    "stop_if",
    "table_of",
    "verified_range",
    "write_shard",
]

Deliver = Callable[[int, memoryview], None]

_IN_FLIGHT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDigest:
    """What is known of a shard when it was written.

    Parameters
    ----------
    nbytes : int
        Size of the file.
    sha256 : str
        SHA-256 of the file, hex.
    crc32 : str
        CRC-32 of the table of CRC-32 values, hex.
    index_crc32 : str
        CRC-32 of the index, hex.
    seconds, seconds_waiting, seconds_syncing : float
        Time in all; of that, for buffers to come free, and for the final fsync.
    """

    nbytes: int
    sha256: str
    crc32: str
    index_crc32: str
    seconds: float
    seconds_waiting: float
    seconds_syncing: float


def write_shard(
    path: Path,
    image: "ShardImage",
    index: bytes,
    parts: Sequence[Array | StreamedArray],
    *,
    block_nbytes: int = DEFAULT_BLOCK_NBYTES,
    direct: bool,
    cancelled: threading.Event | None = None,
    sync: Callable[[int, Path], None] = sync_file,
) -> ShardDigest:
    """Write one shard to a new file and return its digests.

    Parameters
    ----------
    path : Path
        File that must not exist yet.
    image : ShardImage
        Where everything lies.
    index : bytes
        Exactly as long as the image says.
    parts : sequence of ndarray or StreamedArray
        The arrays of the image in its order, of any memory order. Not modified.
    block_nbytes : int
        Bytes of one write, which starts at a multiple of it in the file. A multiple
        of 4096, at most 16 MiB.
    direct : bool
        Whether to go around the page cache, where the file system can.
    cancelled : threading.Event or None
        Ends the writing soon after it was set.
    sync : callable
        Makes an open file durable; called once.

    Raises
    ------
    StorageError
        If the file system refuses; the file was removed.
    CheckpointError
        If it was cancelled; the file was removed.

    Notes
    -----
    Durable when it returns, but for the file's name. Extra memory: 18 MiB with the
    default blocks, 34 MiB at most.
    """
    begin = perf_counter()
    with new_shard_file(path, nbytes=image.nbytes, direct=direct) as file:
        with ring_of(file.write_at, block_nbytes, _IN_FLIGHT) as ring:
            outflow = Outflow(file, ring, block_nbytes, cancelled)
            regions = regions_before_table(image, index, parts)
            for offset, content in joined(regions):
                outflow.pad_to(offset)
                for piece in pieces_of(content):
                    outflow.take(piece)
            outflow.pad_to(image.table_offset)
            tail = bytes_after_table(image)
            table = outflow.table() + table_of(tail)
            outflow.take(memoryview(table))
            outflow.take(memoryview(tail))
            outflow.finish()
        written = perf_counter()
        sync(file.descriptor, path)
    end = perf_counter()
    return ShardDigest(
        nbytes=image.nbytes,
        sha256=outflow.sha256.hexdigest(),
        crc32=crc32_hex(crc32(table)),
        index_crc32=crc32_hex(crc32(index)),
        seconds=end - begin,
        seconds_waiting=outflow.seconds_waiting,
        seconds_syncing=end - written,
    )


def read_shard(
    path: Place,
    *,
    nbytes: int,
    spans: Sequence[Span],
    check: Check,
    deliver: Deliver,
    direct: bool,
    block_nbytes: int = DEFAULT_BLOCK_NBYTES,
    cancelled: threading.Event | None = None,
) -> None:
    """Read parts of a shard, or all of it, and verify them.

    Parameters
    ----------
    path : Path or RemotePath
        File that must be a regular one of `nbytes` bytes.
    nbytes : int
        Size of the file, from the manifest.
    spans : sequence of (int, int)
        Ranges of bytes to read, ascending, as `check` can verify them.
    check : WholeFileSha256, BlockCrc32 or NoCheck
        How to verify what is read.
    deliver : callable
        Called with the offset and the bytes of each chunk in file order. The bytes
        are valid during the call only, and verified only when `read_shard` returns.
    direct : bool
        Whether to go around the page cache, where the file system can.
    block_nbytes : int
        Bytes of one read: a multiple of 4096, at most 16 MiB.
    cancelled : threading.Event or None
        Ends the reading soon after it was set.

    Raises
    ------
    IncompleteCheckpointError
        If the file is missing or has another size.
    CorruptShardError
        If a digest differs.
    StorageError
        If the file system refuses.
    CheckpointError
        If it was cancelled.
    """
    reads = _plan_reads(spans, block_nbytes)
    verifier = check.begin(path, nbytes, spans)
    with (
        open_to_read(path, nbytes=nbytes, direct=direct) as file,
        ring_of(file.read_at, block_nbytes, _IN_FLIGHT) as ring,
    ):
        for turn, read in enumerate(reads[: ring.depth]):
            ring.start(turn, read.offset, read.nbytes)
        for turn, read in enumerate(reads):
            stop_if(cancelled, path)
            buffer = ring.buffer(turn)
            for start in range(read.start, read.stop, CHUNK_NBYTES):
                stop = min(start + CHUNK_NBYTES, read.stop)
                chunk = buffer[start - read.offset : stop - read.offset]
                verifier.update(start, chunk)
                deliver(start, chunk)
            if turn + ring.depth < len(reads):
                following = reads[turn + ring.depth]
                ring.start(turn + ring.depth, following.offset, following.nbytes)
    verifier.finish()


def read_verified(path: Place, offset: int, nbytes: int, expected: str) -> bytes:
    """Return a small range of a file, verified; see `verified_range`."""
    with open_to_read(path) as file:
        return verified_range(file, offset, nbytes, expected)


def verified_range(file: OpenFile, offset: int, nbytes: int, expected: str) -> bytes:
    """Return a small range of an open file, verified.

    Parameters
    ----------
    file : OpenFile
        The file.
    offset, nbytes : int
        The range; its length is bounded by the caller.
    expected : str
        CRC-32 of the range as 8 lower-case hex digits.

    Raises
    ------
    IncompleteCheckpointError
        If the file is missing or ends before the range does.
    CorruptShardError
        If the CRC-32 differs.
    StorageError
        If the file system refuses.
    """
    stop = offset + nbytes
    if file.nbytes < stop:
        raise wrong_size(file.path, f"at least {stop}", stop, file.nbytes)
    content = bytearray(nbytes)
    file.read_at(memoryview(content), offset)
    actual = crc32_hex(crc32(content))
    if actual != expected:
        raise corrupt_shard(file.path, f"bytes {offset} to {stop}", expected, actual)
    return bytes(content)


@dataclass(frozen=True, slots=True)
class _Read:
    """One aligned read, and the range in it that was asked for."""

    offset: int
    nbytes: int
    start: int
    stop: int


def _plan_reads(spans: Sequence[Span], block_nbytes: int) -> list[_Read]:
    reads = []
    for first, last in spans:
        start = first
        while start < last:
            stop = min(start - start % block_nbytes + block_nbytes, last)
            offset = start - start % DIRECT_ALIGNMENT
            nbytes = -(-(stop - offset) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
            reads.append(_Read(offset, nbytes, start, stop))
            start = stop
    return reads


def table_of(tail: bytes) -> bytes:
    """Return the part of the table that covers what lies behind the table."""
    blocks = BlockCrc()
    blocks.update(tail)
    return blocks.table()
