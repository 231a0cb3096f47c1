"""MPI program: one rank of four saves more than the file system has room for."""

import json
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import SaveOptions, load_sharded, save_sharded
from mpickpt.storage import room
from tests.crash.programs.outcomes import attempt
from tests.crash.small_state import files_of, flat, state_of

COMM = MPI.COMM_WORLD
OPTIONS = SaveOptions(block_nbytes=64 << 10, timeout_s=60)
LARGE = 500_000  # 8 MB


def save(path: Path, step: int, rows: int) -> None:
    save_sharded(
        state_of(COMM.rank, step, rows), path, step=step, comm=COMM, options=OPTIONS
    )


def load(path: Path) -> Any:
    tree = load_sharded(path, comm=COMM, timeout_s=60)
    assert flat(tree) == flat(state_of(COMM.rank, tree["step"], 1000))
    return tree["step"]


def main() -> None:
    disk, moment = Path(sys.argv[1]), sys.argv[2]
    if moment == "while it writes":
        # Somebody else fills the disk after the library has looked.
        room.require_space = lambda *_, **__: None
    save(disk / "step-1", 1, 1000)
    said = attempt(save, disk / "step-2", 2, LARGE if COMM.rank == 2 else 1000)
    COMM.barrier()
    said["files after"] = sorted(files_of(disk / "step-2"))
    COMM.barrier()
    said["load previous"] = attempt(load, disk / "step-1")
    said["again"] = attempt(save, disk / "step-2", 2, 1000)
    gathered = COMM.gather(said)
    if COMM.rank == 0:
        (disk / "said.json").write_text(json.dumps(gathered))


main()
