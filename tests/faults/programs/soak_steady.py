"""MPI program: one long start in which nobody dies, and what it uses meanwhile.

``soak_steady.py RUN MODE N_CYCLES WARM_UP REPORT``
"""

import errno
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import (
    CheckpointManager,
    EverySteps,
    KeepEvery,
    KeepLast,
    SaveOptions,
    StorageError,
)
from tests.faults.programs.soak_faults import CALLS, failing
from tests.faults.programs.soak_meter import (
    CountingComm,
    allocated_nbytes,
    calm,
    growth,
    resident_nbytes,
)
from tests.faults.soak_state import PureState

COMM = CountingComm(MPI.COMM_WORLD)
RUN, MODE, REPORT = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[5])
N_CYCLES, WARM_UP = int(sys.argv[3]), int(sys.argv[4])
OPTIONS = SaveOptions(timeout_s=60)
EVERY = 10

state = PureState(COMM.rank, COMM.size)
dice = random.Random(MODE)
n_failed = [0]
n_rejected = [0]


def opened() -> CheckpointManager:
    return CheckpointManager(
        RUN,
        COMM,
        state=state.tree,
        keep=KeepLast(2) | KeepEvery(100),
        when=EverySteps(1),
        options=OPTIONS,
        asynchronous=MODE != "sync",
        progress="poll" if MODE == "poll" else "auto",
    )


def save(manager: CheckpointManager, step: int) -> None:
    state.advance(step)
    manager.save_if_due(step)


def fail(manager: CheckpointManager, step: int) -> None:
    """Save while a call fails on some rank; every time another one."""
    victim, call, turn = (
        dice.randrange(COMM.size),
        dice.choice(CALLS),
        dice.randrange(9),
    )
    state.advance(step)
    with failing(call, turn if COMM.rank == victim else -1, errno.ENOSPC):
        try:
            manager.save(step)
            manager.wait()
        except StorageError:
            n_failed[0] += 1


def restore(manager: CheckpointManager, step: int) -> None:
    """Save, restore, and go back by one now and then."""
    state.advance(manager.next_step)
    manager.save(manager.next_step)
    if step % 7 == 0:
        manager.wait()
        manager.rewind(manager.next_step - 1)
        n_rejected.append(len(list(RUN.glob("*.rejected-*"))))
        COMM.Barrier()
    manager.restore_latest()


MODES: dict[str, Callable[[CheckpointManager, int], None]] = {
    "async": save,
    "poll": save,
    "sync": save,
    "failing": lambda m, step: fail(m, step) if step % 4 == 0 else save(m, step),
    "restoring": restore,
    "reopening": save,
}


def measured() -> dict[str, Any]:
    resident, allocated, wanted, held = [], [], None, []
    manager = opened()
    for cycle in range(1, N_CYCLES + 1):
        MODES[MODE](manager, cycle)
        if MODE == "reopening" and cycle % EVERY == 0:
            manager.close()
            manager = opened()
        if cycle % EVERY == 0:
            manager.wait()
            COMM.Barrier()
            if cycle >= WARM_UP:
                allocated.append(allocated_nbytes())
                resident.append(resident_nbytes())
                if wanted is None or cycle % 50 == 0:
                    held.append(calm(wanted))
                    wanted = wanted or held[0]
            COMM.Barrier()
    manager.close()
    return {
        "resident": resident[-1] - resident[0],
        "allocated": growth(allocated) / EVERY,
        "held": held,
        "failed": n_failed[0],
        "most_rejected": max(n_rejected),
    }


def main() -> None:
    reports = COMM.gather(measured())
    if COMM.rank == 0:
        REPORT.write_text(json.dumps(reports))


main()
