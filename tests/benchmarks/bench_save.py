"""Measures saving and loading side by side with the bounds that the machine sets.

Run as ``mpiexec -n 2 python tests/benchmarks/bench_save.py [--mib 512] [--json]``.
Every way writes (or reads, from a cold cache) the same bytes on every rank at the
same time and is as durable: what is written is synced within the time. The ways take
turns, in another order in each round; figures are medians over the rounds.

- raw: plain pwrite or pread of incompressible bytes, the fastest of
  {1, 4, 8 MiB} x {1, 4 in flight} x {direct, buffered}.
- ceiling: copy, SHA-256 and CRC-32 in memory, without I/O.
"""

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

from mpickpt import Sharded, load_sharded, save_sharded
from mpickpt.format.digest import crc32

MIB = 1 << 20
CHUNK_NBYTES = 256 << 10
RAW_WAYS = tuple(product((1, 4, 8), (1, 4), (True, False)))
Way = Callable[[], None]


@dataclass(kw_only=True)
class Bench:
    """What one rank writes and where; `seconds` holds the timings of every way."""

    comm: MPI.Intracomm
    directory: Path
    arrays: dict[str, np.ndarray]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of one rank."""
        return sum(array.nbytes for array in self.arrays.values())

    def path(self, name: str) -> Path:
        """Return this rank's file of that name."""
        return self.directory / f"{name}-{self.comm.rank}.h5"

    @property
    def checkpoint(self) -> Path:
        """Return the directory of the library's checkpoint."""
        return self.directory / "checkpoint"

    @property
    def shard(self) -> Path:
        """Return this rank's shard in it."""
        (shard,) = self.checkpoint.glob(f"rank{self.comm.rank:05d}-*.h5")
        return shard

    def state(self) -> dict[str, Sharded]:
        """Return the state tree that the library saves."""
        return {name: Sharded.block(array) for name, array in self.arrays.items()}

    def measure(self, name: str, way: Way) -> None:
        """Time one way on all ranks at once."""
        self.barrier()
        begin = time.perf_counter()
        way()
        self.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def barrier(self) -> None:
        """Wait for all ranks without taking the processor from them."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(50e-6)

    def rate(self, name: str) -> float:
        """Return the median rate of all ranks together, in GB/s."""
        total = self.nbytes * self.comm.size
        return total / statistics.median(self.seconds[name]) / 1e9


def main() -> None:
    """Measure everything and print one table."""
    options = parse_options()
    comm = MPI.COMM_WORLD
    with tempfile.TemporaryDirectory(dir=options.directory) as own:
        directory = Path(comm.bcast(own))
        bench = Bench(
            comm=comm,
            directory=directory,
            arrays=incompressible_arrays(options.mib, seed=comm.rank),
        )
        writes, reads = write_ways(bench), read_ways(bench)
        for number in range(options.rounds):
            for name, way in shuffled(writes, number):
                remove_files(bench)
                bench.measure(name, way)
            remove_files(bench)
            save_with_library(bench)
            for name, way in shuffled(reads, number):
                forget_pages(bench)
                bench.measure(name, way)
        bench.barrier()
    if comm.rank == 0:
        print(json.dumps(rows(bench)) if options.json else table(bench))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="MiB of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    return parser.parse_args()


def incompressible_arrays(mib: int, seed: int) -> dict[str, np.ndarray]:
    """Return arrays of odd sizes, as of parameters and two moments."""
    rng = np.random.default_rng(seed)
    count = mib * MIB // 14
    return {
        name: np.frombuffer(bytearray(rng.bytes(count * itemsize)), dtype)
        for name, dtype, itemsize in (
            ("model/w", "f2", 2),
            ("adam/fp32", "f4", 4),
            ("adam/m", "f4", 4),
            ("adam/v", "f4", 4),
        )
    }


def write_ways(bench: Bench) -> dict[str, Way]:
    """Return every way to write, by name."""
    source = aligned_bytes(bench)
    raw = {
        f"raw write {raw_name(*way)}": lambda way=way: raw_write(bench, source, *way)
        for way in RAW_WAYS
    }
    return raw | {
        "ceiling": lambda: copy_and_digest(bench),
        "mpickpt save": lambda: save_with_library(bench),
        "h5py per rank, fsync, SHA-256 read back": lambda: save_with_h5py(bench),
        "gather to rank 0, one file": lambda: save_gathered(bench),
    }


def read_ways(bench: Bench) -> dict[str, Way]:
    """Return every way to read, by name."""
    raw = {
        f"raw read {raw_name(*way)}": lambda way=way: raw_read(bench, *way)
        for way in RAW_WAYS
    }
    return raw | {
        "mpickpt read, sha256": lambda: read_with_library(bench, "sha256"),
        "mpickpt read, crc32": lambda: read_with_library(bench, "crc32"),
    }


def raw_name(mib: int, in_flight: int, direct: bool) -> str:
    """Return what a raw way is called."""
    return f"{'direct' if direct else 'buffered'} {mib} MiB x {in_flight}"


def raw_write(
    bench: Bench, source: memoryview, mib: int, in_flight: int, direct: bool
) -> None:
    """Write the bytes of a rank with pwrite alone, and sync them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    descriptor = os.open(bench.path("raw"), flags)

    def write(offset: int) -> None:
        start = offset % len(source)
        os.pwrite(descriptor, source[start : start + mib * MIB], offset)

    in_threads(write, whole_blocks(bench, mib), in_flight)
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(bench: Bench, mib: int, in_flight: int, direct: bool) -> None:
    """Read a rank's file with pread alone."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    descriptor = os.open(bench.shard, flags)
    buffers = [mmap.mmap(-1, mib * MIB) for _ in range(in_flight)]

    def read(offset: int) -> None:
        buffer = buffers[offset // (mib * MIB) % in_flight]
        os.preadv(descriptor, [buffer], offset)

    in_threads(read, whole_blocks(bench, mib), in_flight)
    os.close(descriptor)


def in_threads(transfer: Callable[[int], None], offsets: range, count: int) -> None:
    """Call `transfer` for each offset, `count` at a time."""
    if count == 1:
        for offset in offsets:
            transfer(offset)
        return

    def serve(first: int) -> None:
        for offset in offsets[first::count]:
            transfer(offset)

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(serve, range(count)))


def whole_blocks(bench: Bench, mib: int) -> range:
    """Return the offsets of the blocks of a rank's bytes."""
    return range(0, bench.nbytes, mib * MIB)


def aligned_bytes(bench: Bench) -> memoryview:
    """Return 64 MiB of the rank's bytes in aligned memory."""
    memory = mmap.mmap(-1, 64 * MIB)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:] = np.random.default_rng(bench.comm.rank).bytes(len(view))
    return view


def copy_and_digest(bench: Bench) -> None:
    """Copy, SHA-256 and CRC-32 of a rank's bytes, chunk by chunk, without I/O."""
    sha256, crc = hashlib.sha256(), 0
    chunk = memoryview(bytearray(CHUNK_NBYTES))
    for array in bench.arrays.values():
        view = array.view(np.uint8).data
        for start in range(0, len(view), CHUNK_NBYTES):
            piece = view[start : start + CHUNK_NBYTES]
            copied = chunk[: len(piece)]
            copied[:] = piece
            sha256.update(copied)
            crc = crc32(copied, crc)


def save_with_library(bench: Bench) -> None:
    """Save as a program does: durable, digested, agreed on and published."""
    save_sharded(bench.state(), bench.checkpoint, step=0, comm=bench.comm)


def read_with_library(bench: Bench, verify: str) -> None:
    """Load into the state's arrays, in place."""
    load_sharded(bench.checkpoint, comm=bench.comm, like=bench.state(), verify=verify)


def save_with_h5py(bench: Bench) -> None:
    """Save through HDF5 and digest what was written by reading it again."""
    path = bench.path("h5py")
    with h5py.File(path, "w") as file:
        for name, array in bench.arrays.items():
            file[name] = array
    sync(path)
    with path.open("rb") as stream:
        hashlib.file_digest(stream, "sha256")


def save_gathered(bench: Bench) -> None:
    """Send everything to rank 0, which writes one file."""
    comm = bench.comm
    if comm.rank:
        for array in bench.arrays.values():
            comm.Send(array.view(np.uint8), dest=0)
        return
    path = bench.path("gathered")
    with h5py.File(path, "w") as file:
        for rank, (name, array) in product(range(comm.size), bench.arrays.items()):
            received = array
            if rank:
                received = np.empty_like(array)
                comm.Recv(received.view(np.uint8), source=rank)
            file[f"{rank}/{name}"] = received
    sync(path)


def sync(path: Path) -> None:
    """Make a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def remove_files(bench: Bench) -> None:
    """Remove the rank's files and let the disk finish with them."""
    bench.barrier()
    for path in bench.directory.glob(f"*-{bench.comm.rank}.h5"):
        path.unlink()
    if bench.comm.rank == 0:
        shutil.rmtree(bench.checkpoint, ignore_errors=True)
    os.sync()
    bench.barrier()


def forget_pages(bench: Bench) -> None:
    """Drop the rank's shard from the page cache."""
    descriptor = os.open(bench.shard, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def shuffled(ways: dict[str, Way], seed: int) -> list[tuple[str, Way]]:
    """Return the ways in an order that is the same on every rank."""
    return random.Random(seed).sample(list(ways.items()), len(ways))


def rows(bench: Bench) -> list[dict[str, object]]:
    """Return name, rate and ratio to the bound of every way."""
    names = sorted(bench.seconds, key=bench.rate, reverse=True)
    best = {
        kind: next(name for name in names if name.startswith(f"raw {kind}"))
        for kind in ("write", "read")
    }
    return [
        {
            "way": name,
            "gb_per_s": round(bench.rate(name), 3),
            "ratio": ratio(bench, name, best),
            "best_raw": name in best.values(),
        }
        for name in names
    ]


def ratio(bench: Bench, name: str, best: dict[str, str]) -> float | None:
    """Return the rate relative to the bound: raw, and the ceiling where it digests."""
    if name == "ceiling":
        return None
    bound = bench.rate(
        best["read" if " read," in name or "raw read" in name else "write"]
    )
    if not name.startswith("raw") and "crc32" not in name:
        bound = min(bound, bench.rate("ceiling"))
    return round(bench.rate(name) / bound, 3)


def table(bench: Bench) -> str:
    """Return the rows as text."""
    size = f"{bench.comm.size} ranks x {bench.nbytes / MIB:.0f} MiB"
    lines = [f"{size}, fsynced, cold reads; ratio to min(raw, ceiling)", ""]
    for row in rows(bench):
        marked = " *" if row["best_raw"] else ""
        value = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(f"{row['way']!s:42}{row['gb_per_s']:6.2f} GB/s {value:>6}{marked}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
