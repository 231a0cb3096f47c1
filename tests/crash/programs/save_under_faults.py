"""MPI program: saves and loads while strace fails one system call of one rank.

For each case: a collective call under the fault; what every rank raised; what is left
in the directory; whether the checkpoint of before loads; whether the same can then
be done again, and what is in the directory after that.
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import SaveOptions, load_sharded, save_sharded
from tests.crash.programs.injection import Fault, injected
from tests.crash.programs.outcomes import attempt
from tests.crash.small_state import files_of, flat, state_of

COMM = MPI.COMM_WORLD
ROWS = 40_000  # 640 kB a rank: ten writes
OPTIONS = SaveOptions(block_nbytes=64 << 10, timeout_s=60)


def save(path: Path, step: int, *, overwrite: bool = False) -> None:
    save_sharded(
        state_of(COMM.rank, step, ROWS),
        path,
        step=step,
        comm=COMM,
        overwrite=overwrite,
        options=OPTIONS,
    )


def load(path: Path) -> int:
    """Load, compare every byte with what was saved, and return the step."""
    tree = load_sharded(path, comm=COMM, timeout_s=60)
    assert flat(tree) == flat(state_of(COMM.rank, tree["step"], ROWS))
    return tree["step"]


def run_case(case: dict[str, Any], run: Path) -> dict[str, Any]:
    fault = Fault(**case["fault"])
    path = run / case["name"]
    if case["action"] != "save":
        save(path, 1)
    calls = {
        "save": lambda: save(path, 2),
        "overwrite": lambda: save(path, 2, overwrite=True),
        "load": lambda: load(path),
    }
    hits: list[str] = []
    COMM.barrier()
    with contextlib.ExitStack() as stack:
        if fault.rank == COMM.rank:
            hits = stack.enter_context(injected(fault))
        COMM.barrier()
        said = attempt(calls[case["action"]])
    COMM.barrier()
    said["hits"] = hits
    said["files after"] = sorted(files_of(path))
    COMM.barrier()
    said["load after"] = attempt(load, path)
    said["load previous"] = attempt(load, run / "previous")
    said["again"] = attempt(save, path, 3, overwrite=True)
    said["load again"] = attempt(load, path)
    said["files again"] = sorted(files_of(path))
    return said


def main() -> None:
    run, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    save(run / "previous", 0)
    for case in cases:
        gathered = COMM.gather(run_case(case, run))
        if COMM.rank == 0:
            (run / f"{case['name']}.json").write_text(json.dumps(gathered))
            shutil.rmtree(run / case["name"])
        COMM.barrier()


main()
