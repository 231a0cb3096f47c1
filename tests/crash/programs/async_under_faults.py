"""MPI program: trains while strace fails one system call behind a save's back.

For each case, in a run directory of its own: a save that ends well, one under the
fault, steps until something is raised, and what is there then.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import SaveOptions, checkpoints
from tests.crash.programs.injection import Fault, injected
from tests.crash.programs.outcomes import attempt
from tests.crash.small_state import files_of
from tests.training import Training, manager_of

COMM = MPI.COMM_WORLD
ROWS = 40_000  # 640 kB a rank: ten writes
OPTIONS = SaveOptions(block_nbytes=64 << 10, timeout_s=60)
MOST_STEPS = 100_000


def steps_until_raised(manager: Any, training: Training, reached: list[int]) -> None:
    for step in range(3, MOST_STEPS):
        training.train(step)
        reached.append(step)
        manager.save_if_due(step)


def run_case(case: dict[str, Any], run: Path) -> dict[str, Any]:
    fault, training = Fault(**case["fault"]), Training(COMM, ROWS)
    reached: list[int] = []
    hits: list[str] = []
    options = {"options": OPTIONS, "progress": case["progress"]}
    with manager_of(run, COMM, training, **options) as manager:
        training.train(1)
        manager.save(1, wait=True)
        training.train(2)
        with contextlib.ExitStack() as stack:
            if fault.rank == COMM.rank:
                hits = stack.enter_context(injected(fault))
            COMM.barrier()
            manager.save(2)
            said = attempt(steps_until_raised, manager, training, reached)
            COMM.barrier()
        said["files after"] = sorted(files_of(run / "step-0000000002"))
        COMM.barrier()
        restored = manager.restore_latest()
        training.adopt(restored)
        training.require_step(1)
        training.train(reached[-1] + 1)
        manager.save(reached[-1] + 1)
    COMM.barrier()
    said["published"] = [entry.step for entry in checkpoints(run)]
    return said | {"hits": hits, "reached": reached[-1]}


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    for case in cases:
        gathered = COMM.gather(run_case(case, folder / case["name"]))
        if COMM.rank == 0:
            (folder / f"{case['name']}.json").write_text(json.dumps(gathered))


main()
