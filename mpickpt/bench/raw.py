"""Writes and reads files with pwrite and pread alone: the bound that the disk sets."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from mpickpt.bench.bench import Bench, random_bytes
from mpickpt.bench.rounds import Way
from mpickpt.storage.commit import sync_file
from mpickpt.storage.large_memory import allocate

_MIB = 1 << 20
_PAGE_NBYTES = 4096
_SOURCE_NBYTES = 64 * _MIB
_BLOCKS_MIB = (1, 4, 8)
_IN_FLIGHT = (1, 4)
_O_DIRECT = getattr(os, "O_DIRECT", 0)


def raw_writes(bench: Bench) -> dict[str, Way]:
    """Return every way to write this rank's bytes and sync them."""
    source = _aligned_bytes(bench)
    return {
        f"raw write {name}": partial(_write, bench, source, *way)
        for name, way in _ways(bench.directory).items()
    }


def raw_reads(bench: Bench, path: Path) -> dict[str, Way]:
    """Return every way to read a file."""
    return {
        f"raw read {name}": partial(_read, path, *way)
        for name, way in _ways(bench.directory).items()
    }


def _ways(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return block size in bytes, blocks in flight and flags, by name."""
    flags = {"buffered": 0}
    if _O_DIRECT and _takes_direct(directory):
        flags = {"direct": _O_DIRECT, **flags}
    return {
        f"{kind} {mib} MiB x {count}": (mib * _MIB, count, flags[kind])
        for kind, mib, count in product(flags, _BLOCKS_MIB, _IN_FLIGHT)
    }


def _takes_direct(directory: Path) -> bool:
    # A name for each process: all ranks ask at the same time.
    path = directory / f"direct-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | _O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _write(
    bench: Bench, source: memoryview, block_nbytes: int, in_flight: int, flags: int
) -> None:
    path = bench.own_file
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)
    end = -(-bench.nbytes // _PAGE_NBYTES) * _PAGE_NBYTES

    def write(offset: int) -> None:
        start = offset % len(source)
        stop = start + min(block_nbytes, end - offset)
        if os.pwrite(descriptor, source[start:stop], offset) != stop - start:
            raise OSError(f"{path}: a short write; is the disk full?")

    _in_threads(write, range(0, end, block_nbytes), in_flight)
    sync_file(descriptor, path)
    os.close(descriptor)


def _read(path: Path, block_nbytes: int, in_flight: int, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    buffers = [allocate(block_nbytes) for _ in range(in_flight)]

    def read(offset: int) -> None:
        buffer = buffers[offset // block_nbytes % in_flight]
        os.preadv(descriptor, [buffer], offset)

    size = os.fstat(descriptor).st_size
    _in_threads(read, range(0, size, block_nbytes), in_flight)
    os.close(descriptor)


def _in_threads(transfer: Callable[[int], None], offsets: range, count: int) -> None:
    if count == 1:
        for offset in offsets:
            transfer(offset)
        return

    def serve(first: int) -> None:
        for offset in offsets[first::count]:
            transfer(offset)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(serve, range(count)))


def _aligned_bytes(bench: Bench) -> memoryview:
    """Return random bytes in memory that the disk can fetch from, used round and round.

    Their number is a multiple of every block size.
    """
    view = allocate(min(_SOURCE_NBYTES, _whole_blocks(bench.nbytes)))
    rng = np.random.default_rng(bench.ranks.rank)
    view[:] = random_bytes(rng, len(view)).data
    return view


def _whole_blocks(nbytes: int) -> int:
    largest = max(_BLOCKS_MIB) * _MIB
    return -(-nbytes // largest) * largest
