"""Measures the import of a DeepSpeed checkpoint against reading and copying its bytes.

    mpiexec -n 2 python -m tests.benchmarks.deepspeed_import [--gib 1] [--rounds 3]

Each rank reads and copies whole files of its share; copies are synced, as the import's
shards are. Ways go in turn; the medians' ratios are printed. The source is in the page
cache.
"""

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from mpi4py import MPI

from mpickpt import importers
from mpickpt.format.digest import crc32
from tests.interop.imitated_deepspeed import write_zero

BLOCK_NBYTES = 8 << 20
NBYTES_EACH = 14  # bf16 parameter, fp32 master, two moments
comm = MPI.COMM_WORLD


def blocks(path):
    buffer = memoryview(bytearray(BLOCK_NBYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield buffer[:count]


def read(files, _target):
    for path in files:
        for _ in blocks(path):
            pass


def read_and_check(files, _target):
    for path in files:
        value = 0
        for block in blocks(path):
            value = crc32(block, value)


def copy(files, target):
    if comm.rank == 0:
        target.mkdir()
    comm.Barrier()
    for path in files:
        with (target / path.name).open("wb", buffering=0) as file:
            for block in blocks(path):
                file.write(block)
            os.fsync(file.fileno())


def shared_out(tag):
    """Return this rank's share of the files, by bytes."""
    shares = [(0, rank, []) for rank in range(comm.size)]
    for path in sorted(tag.iterdir(), key=lambda path: -path.stat().st_size):
        nbytes, rank, files = min(shares)
        shares.remove((nbytes, rank, files))
        shares.append((nbytes + path.stat().st_size, rank, [*files, path]))
    return next(files for _, rank, files in shares if rank == comm.rank)


def seconds_of(way, files, target):
    comm.Barrier()
    start = time.perf_counter()
    way(files, target)
    comm.Barrier()
    taken = time.perf_counter() - start
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
    return taken


def measured(source, directory, rounds):
    files = shared_out(source / "global_step2")
    ways = {
        "read": read,
        "read and CRC-32": read_and_check,
        "copy, synced": copy,
        "import": lambda _, target: importers.deepspeed(source, target, comm=comm),
    }
    taken = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(seconds_of(way, files, directory / "target"))
    return {name: statistics.median(each) for name, each in taken.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", default=None)
    options = parser.parse_args()
    made = tempfile.mkdtemp(dir=options.directory) if comm.rank == 0 else None
    directory = Path(comm.bcast(made))
    n_layers = max(1, int(options.gib * 2**30 / NBYTES_EACH / (1024 * 1331)))
    shapes = {f"layers.{i}.weight": (1024, 1331) for i in range(n_layers)}
    gb = sum(map(math.prod, shapes.values())) * NBYTES_EACH / 1e9
    for stage in (1, 3):
        source = directory / f"zero{stage}"
        if comm.rank == 0:
            write_zero(source, shapes, n_ranks=4, stage=stage)
        comm.Barrier()
        medians = measured(source, directory, options.rounds)
        if comm.rank == 0:
            for name, taken in medians.items():
                ratio = medians["import"] / taken
                print(
                    f"ZeRO {stage}, {comm.size} ranks, {gb:.2f} GB: {name:16} "
                    f"{taken:6.2f} s  {gb / taken:5.2f} GB/s  import/this {ratio:5.2f}"
                )
    if comm.rank == 0:
        shutil.rmtree(directory)


main()
