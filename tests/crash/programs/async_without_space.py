"""MPI program: trains on a file system that fills up.

``async_without_space.py DISK filled``: somebody fills it while a save is written.
``async_without_space.py DISK small``: it holds a few checkpoints only.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import SaveOptions, checkpoints
from mpickpt.parallel import pending
from mpickpt.storage.verification import verify_checkpoint
from tests.crash.programs.outcomes import attempt
from tests.training import Training, manager_of

COMM = MPI.COMM_WORLD
ROWS = 30_000  # 480 kB a rank
OPTIONS = SaveOptions(block_nbytes=64 << 10, timeout_s=60)


def fill(disk: Path, filler: Path) -> None:
    found = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize)


def filled(disk: Path) -> dict[str, Any]:
    is_full = threading.Event()
    write = pending.write_staged_file

    def write_later(path: Path, *arguments: Any) -> Any:
        is_full.wait(60)
        return write(path, *arguments)

    training = Training(COMM, ROWS)
    reached = []

    def go_on(manager: Any) -> None:
        for step in range(3, 100_000):
            training.train(step)
            reached.append(step)
            manager.save_if_due(step)

    with manager_of(disk / "run", COMM, training, options=OPTIONS) as manager:
        training.train(1)
        manager.save(1, wait=True)
        training.train(2)
        pending.write_staged_file = write_later
        manager.save(2)
        if COMM.rank == 0:
            fill(disk, disk / "filler")
        COMM.barrier()
        is_full.set()
        said = attempt(go_on, manager)
        COMM.barrier()
        if COMM.rank == 0:
            (disk / "filler").unlink()
        training.adopt(manager.restore_latest())
        training.require_step(1)
        manager.save(2)
    COMM.barrier()
    return said | {"steps": steps_of(disk), "reached": reached[-1]}


def small(disk: Path) -> dict[str, Any]:
    training, seen = Training(COMM, ROWS), []
    options = {"options": OPTIONS, "keep": 100, "asynchronous": False}
    with manager_of(disk / "run", COMM, training, **options) as manager:
        for step in range(1, 12):
            training.train(step)
            manager.save(step)
            COMM.barrier()
            seen.append(steps_of(disk))
    COMM.barrier()
    whole = all(verify_checkpoint(e.path).is_whole for e in checkpoints(disk / "run"))
    return {"seen": seen, "whole": whole}


def steps_of(disk: Path) -> list[int]:
    return [entry.step for entry in checkpoints(disk / "run")]


def main() -> None:
    disk, case = Path(sys.argv[1]), {"filled": filled, "small": small}[sys.argv[2]]
    gathered = COMM.gather(case(disk))
    if COMM.rank == 0:
        (disk / "said.json").write_text(json.dumps(gathered))


main()
