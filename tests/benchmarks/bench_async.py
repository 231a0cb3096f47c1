"""Measures what asynchronous saves and the manager cost a training.

Run as ``mpiexec -n 2 python tests/benchmarks/bench_async.py [--mib 256] [--json]``.
Ways that are compared take turns in one run; figures are medians over the rounds.

- blocking: `save_sharded_async` until it returns, against one copy of the state into
  buffers that were written before.
- step: `save_if_due` on a step that is not due, against a bare Iallreduce of one number
  that is posted and completed in the same way.
- memory: how the resident memory of a rank grows over 200 saves.
- verify: loading from memory (/dev/shm) with ``verify="crc32"`` and ``"sha256"``.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpickpt import (
    CheckpointManager,
    EverySteps,
    Sharded,
    load_sharded,
    save_sharded_async,
)

MIB = 1 << 20
PAGE_NBYTES = 4096
COMM = MPI.COMM_WORLD


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="MiB of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    options = parser.parse_args()
    directory = shared_directory(options.directory)
    memory = shared_directory(Path("/dev/shm"))
    try:
        found = {
            "blocking": bench_blocking(directory, options.mib, options.rounds),
            "verify": bench_verify(memory, options.mib, options.rounds),
            "step": bench_step(directory, options.steps, options.rounds),
            "memory": bench_memory(directory),
        }
    finally:
        barrier()
        if COMM.rank == 0:
            shutil.rmtree(directory)
            shutil.rmtree(memory)
    if COMM.rank == 0:
        print(json.dumps(found) if options.json else table(found, options.mib))


def bench_blocking(directory: Path, mib: int, rounds: int) -> dict[str, float]:
    """Return the seconds of a copy and of a save until it returns, and their ratio."""
    arrays = arrays_of(mib)
    buffers = [np.ones_like(array) for array in arrays]
    seconds: dict[str, list[float]] = {"copy": [], "save": []}
    for number in range(rounds + 1):

        def save(number: int = number) -> Any:
            path = directory / f"{number}"
            return save_sharded_async(tree_of(arrays), path, step=number, comm=COMM)

        copied, _ = timed(lambda: copy(arrays, buffers))
        staged, pending = timed(save)
        pending.result()
        if COMM.rank == 0 and number < rounds:
            shutil.rmtree(directory / f"{number}")
        if number:  # the first touches the memory
            seconds["copy"].append(copied)
            seconds["save"].append(staged)
    return compared(seconds, "save", "copy")


def bench_verify(directory: Path, mib: int, rounds: int) -> dict[str, float]:
    """Return the seconds of warm loads, and their ratio."""
    arrays = arrays_of(mib)
    path = directory / "verified"
    save_sharded_async(tree_of(arrays), path, step=1, comm=COMM).result()
    seconds: dict[str, list[float]] = {"crc32": [], "sha256": []}
    for number in range(rounds + 1):
        for verify, found in seconds.items():

            def load(verify: str = verify) -> Any:
                return load_sharded(
                    path, comm=COMM, like=tree_of(arrays), verify=verify
                )

            loaded, _ = timed(load)
            if number:
                found.append(loaded)
    return compared(seconds, "sha256", "crc32")


def bench_step(directory: Path, n_steps: int, rounds: int) -> dict[str, float]:
    """Return the microseconds of a step with a bare Iallreduce and with a manager."""
    sent, received = np.zeros(1), np.zeros(1)

    def bare() -> None:
        request = COMM.Iallreduce(sent, received, op=MPI.MAX)
        for _ in range(n_steps):
            complete(request)
            request = COMM.Iallreduce(sent, received, op=MPI.MAX)
        complete(request)

    tree = {"x": Sharded.block(np.zeros(8))}
    micros: dict[str, list[float]] = {"bare": [], "manager": []}
    with CheckpointManager(
        directory / "run", COMM, state=lambda: tree, when=EverySteps(1 << 40)
    ) as manager:

        def managed() -> None:
            for step in range(n_steps):
                manager.save_if_due(step)

        for _ in range(rounds):
            for name, way in (("bare", bare), ("manager", managed)):
                micros[name].append(timed(way)[0] / n_steps * 1e6)
    found = {name: statistics.median(values) for name, values in micros.items()}
    return found | {"beyond": found["manager"] - found["bare"]}


def bench_memory(directory: Path) -> dict[str, float]:
    """Return by how many MiB a rank grows over 200 saves, the worst of all ranks."""
    arrays = arrays_of(4)
    with CheckpointManager(
        directory / "memory", COMM, state=lambda: tree_of(arrays), keep=2
    ) as manager:
        for step in range(250):
            manager.save(step)
            if step == 49:
                manager.wait()
                before = resident_nbytes()
        manager.wait()
        grown = resident_nbytes() - before
    return {"grown_mib": COMM.allreduce(grown, MPI.MAX) / MIB}


def shared_directory(parent: Path) -> Path:
    """Return a new directory, the same on all ranks."""
    made = tempfile.mkdtemp(dir=parent) if COMM.rank == 0 else None
    return Path(COMM.bcast(made))


def arrays_of(mib: int) -> list[np.ndarray]:
    """Return arrays as of parameters and two moments."""
    rng = np.random.default_rng(COMM.rank)
    count = mib * MIB // 14
    return [
        np.frombuffer(bytearray(rng.bytes(count * np.dtype(dtype).itemsize)), dtype)
        for dtype in ("f2", "f4", "f4", "f4")
    ]


def tree_of(arrays: list[np.ndarray]) -> dict[str, Sharded]:
    """Return the state."""
    return {f"{number}": Sharded.block(array) for number, array in enumerate(arrays)}


def copy(arrays: list[np.ndarray], buffers: list[np.ndarray]) -> None:
    """Copy the state as plainly as can be."""
    for array, buffer in zip(arrays, buffers, strict=True):
        buffer[...] = array


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Call on all ranks at once; return the seconds of the slowest, and the value."""
    barrier()
    begin = time.perf_counter()
    value = call()
    return COMM.allreduce(time.perf_counter() - begin, MPI.MAX), value


def barrier() -> None:
    """Wait for all ranks without taking the processor from them."""
    request = COMM.Ibarrier()
    while not request.Test():
        time.sleep(50e-6)


def complete(request: Any) -> None:
    """Wait for a request, letting the other rank run where cores are few."""
    while not request.Test():
        os.sched_yield()


def resident_nbytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE_NBYTES


def compared(
    seconds: dict[str, list[float]], over: str, under: str
) -> dict[str, float]:
    """Return the medians, and the median of the ratios within each round."""
    ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
    found = {name: statistics.median(values) for name, values in seconds.items()}
    return found | {"ratio": statistics.median(ratios)}


def table(found: dict[str, dict[str, float]], mib: int) -> str:
    """Return what was found as text."""
    blocking, verify = found["blocking"], found["verify"]
    step, memory = found["step"], found["memory"]
    return "\n".join(
        (
            f"{COMM.size} ranks x {mib} MiB",
            f"blocking: copy {blocking['copy'] * 1e3:.1f} ms, save returns after "
            f"{blocking['save'] * 1e3:.1f} ms, ratio {blocking['ratio']:.2f}",
            f"verify, warm: crc32 {verify['crc32'] * 1e3:.1f} ms, sha256 "
            f"{verify['sha256'] * 1e3:.1f} ms, ratio {verify['ratio']:.2f}",
            f"step that is not due: bare Iallreduce {step['bare']:.1f} us, manager "
            f"{step['manager']:.1f} us, beyond {step['beyond']:.1f} us",
            f"memory over 200 saves: {memory['grown_mib']:+.2f} MiB",
        )
    )


if __name__ == "__main__":
    main()
