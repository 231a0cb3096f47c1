"""Runs the headline on a small scale: gather-then-write against shards, throttled.

Run as ``mpiexec -n 8 python tests/benchmarks/headline.py [--rate 4MB/s] [--mib 12]``.
Each rank has a disk of the same speed, and rank 0 a link of that speed, so that the
throttle limits and not this machine; the measured ratios are compared with those that
``mpickpt plan`` predicts from the same speeds, and the exit status says whether they
agree within 15 %.

How it is throttled: `os.pwrite` of this program, through which `save_sharded` writes
its shards, first waits for its turn at a token bucket of the rank, and so does rank 0
for each message that it has received. All else is as it ships: the digests, the syncs,
the messages of the protocol, the manifest.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from mpi4py import MPI

from mpickpt import Sharded, save_sharded
from mpickpt.planning.cost import Job, gather_seconds, shards_seconds
from mpickpt.planning.units import parse_rate

MIB = 1 << 20
PIECE_NBYTES = 256 << 10
WITHIN = 0.15


class TokenBucket:
    """Lets bytes pass at a fixed speed, without bursts; for several threads.

    Not even a short one: to receive and to write in turn, each would save up while it
    waits for the other, and both would run at once.
    """

    def __init__(self, bps: float) -> None:
        self._bps = bps
        self._free_s = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Return when that many bytes have passed."""
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + nbytes / self._bps
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


def throttle_disk(bps: float) -> None:
    """Have every `os.pwrite` of this process wait for its turn."""
    bucket, pwrite = TokenBucket(bps), os.pwrite

    def throttled(descriptor: int, content: memoryview, offset: int) -> int:
        written = pwrite(descriptor, content, offset)
        bucket.take(written)
        return written

    os.pwrite = throttled


def main() -> int:
    """Measure the three ways and compare their ratios with the plan's."""
    options = parse_options()
    comm = MPI.COMM_WORLD
    part = np.random.default_rng(comm.rank).integers(
        0, 255, options.mib * MIB, dtype=np.uint8
    )
    with tempfile.TemporaryDirectory(dir=options.directory) as own:
        directory = Path(comm.bcast(own))
        # What a first save does once (imports, duplicates) is not what is compared.
        save_sharded({"x": Sharded.block(part)}, directory / "first", step=0, comm=comm)
        throttle_disk(options.rate)
        measured = {
            "shards": timed(comm, lambda: save_shards(comm, part, directory / "s")),
            "gather, then write": timed(
                comm, lambda: gather(comm, part, directory / "g", options.rate, False)
            ),
            "gather while writing": timed(
                comm, lambda: gather(comm, part, directory / "o", options.rate, True)
            ),
        }
        wait(comm.Ibarrier())
        if comm.rank == 0:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        wait(comm.Ibarrier())
    if comm.rank:
        return 0
    rows = compared(measured, predicted(part.nbytes * comm.size, comm.size, options))
    print(json.dumps(rows, indent=2) if options.json else table(rows))
    return 0 if all(abs(row["deviation"]) <= WITHIN for row in rows) else 1


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=12, help="MiB of each rank")
    parser.add_argument("--rate", type=parse_rate, default=4e6)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    return parser.parse_args()


def save_shards(comm: MPI.Intracomm, part: np.ndarray, path: Path) -> None:
    """Save with the library."""
    save_sharded({"x": Sharded.block(part)}, path, step=1, comm=comm)


def gather(
    comm: MPI.Intracomm, part: np.ndarray, path: Path, bps: float, overlapped: bool
) -> None:
    """Send everything to rank 0, which writes one file, durably."""
    if comm.rank:
        for piece in pieces_of(part):
            wait(comm.Issend(piece, 0))
        return
    arriving = received(comm, part, TokenBucket(bps))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    place = 0
    for piece in ahead(arriving) if overlapped else arriving:
        place += os.pwrite(descriptor, piece, place)
    os.fsync(descriptor)
    os.close(descriptor)


def received(
    comm: MPI.Intracomm, part: np.ndarray, link: TokenBucket
) -> Iterator[np.ndarray]:
    """Yield rank 0's own pieces, then those of the others as the link lets them in."""
    yield from pieces_of(part)
    for source in range(1, comm.size):
        for like in pieces_of(part):
            piece = np.empty_like(like)
            wait(comm.Irecv(piece, source))
            link.take(piece.nbytes)
            yield piece


def ahead(pieces: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the pieces while a thread waits for those that follow."""
    queue: SimpleQueue[np.ndarray | None] = SimpleQueue()

    def fill() -> None:
        for piece in pieces:
            queue.put(piece)
        queue.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (piece := queue.get()) is not None:
        yield piece


def pieces_of(part: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the pieces of an array that one message holds."""
    for start in range(0, part.nbytes, PIECE_NBYTES):
        yield part[start : start + PIECE_NBYTES]


def timed(comm: MPI.Intracomm, way: Callable[[], None]) -> float:
    """Return how long a way takes on all ranks together."""
    wait(comm.Ibarrier())
    begin = time.perf_counter()
    way()
    wait(comm.Ibarrier())
    return time.perf_counter() - begin


def wait(request: MPI.Request) -> None:
    """Wait without taking the processor from the other ranks."""
    while not request.Test():
        time.sleep(200e-6)


def predicted(nbytes: int, ranks: int, options: argparse.Namespace) -> dict[str, float]:
    """Return what `mpickpt plan` computes from the same speeds."""
    job = Job(
        nbytes=nbytes,
        ranks=ranks,
        mtbf_s=4 * 3600.0,
        link_bps=options.rate,
        rank_bps=options.rate,
    )
    return {
        "shards": shards_seconds(job),
        "gather, then write": gather_seconds(job, overlapped=False),
        "gather while writing": gather_seconds(job, overlapped=True),
    }


def compared(
    measured: dict[str, float], plan: dict[str, float]
) -> list[dict[str, object]]:
    """Return seconds and ratios to shards of each way to gather, with the deviation."""
    rows = []
    for way in ("gather, then write", "gather while writing"):
        ratio = measured[way] / measured["shards"]
        expected = plan[way] / plan["shards"]
        rows.append(
            {
                "way": way,
                "seconds": round(measured[way], 2),
                "planned_seconds": round(plan[way], 2),
                "shards_seconds": round(measured["shards"], 2),
                "planned_shards_seconds": round(plan["shards"], 2),
                "ratio": round(ratio, 2),
                "planned_ratio": round(expected, 2),
                "deviation": round(ratio / expected - 1, 3),
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as text."""
    lines = [
        f"{'way':24}{'measured':>10}{'planned':>10}{'shards':>9}{'planned':>10}"
        f"{'ratio':>8}{'planned':>9}{'off by':>9}"
    ]
    for row in rows:
        lines.append(
            f"{row['way']:24}{row['seconds']:>8} s{row['planned_seconds']:>8} s"
            f"{row['shards_seconds']:>7} s{row['planned_shards_seconds']:>8} s"
            f"{row['ratio']:>8}{row['planned_ratio']:>9}{row['deviation']:>+9.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
