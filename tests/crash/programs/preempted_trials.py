"""MPI program: many runs in which one rank is told to stop at a random moment.

``preempted_trials.py RUN TRIALS SEED THREADS``
"""

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import mpi4py

mpi4py.rc.thread_level = sys.argv[4]

from mpi4py import MPI  # noqa: E402

from mpickpt import EverySteps, Preemption, latest  # noqa: E402
from tests.training import Training, manager_of, saved_step  # noqa: E402

COMM = MPI.COMM_WORLD
LONGEST_S = 0.03
N_STEPS = 5_000


def pass_around():
    COMM.sendrecv(
        COMM.rank, dest=(COMM.rank + 1) % COMM.size, source=(COMM.rank - 1) % COMM.size
    )


def trial(run, first, rng):
    """Train on until a random rank is signalled; return where this rank stopped."""
    training, preemption = Training(COMM), Preemption(install=True)
    target, delay_s = rng.randrange(COMM.size), rng.uniform(0, LONGEST_S)
    with manager_of(
        run, COMM, training, keep=1, when=EverySteps(7), preemption=preemption
    ) as manager:
        if COMM.rank == target:
            arguments = (os.getpid(), rng.choice([signal.SIGTERM, signal.SIGUSR1]))
            threading.Timer(delay_s, os.kill, arguments).start()
        for step in range(first, first + N_STEPS):
            pass_around()
            training.train(step)
            manager.save_if_due(step)
            if manager.should_stop:
                break
    return step, manager.should_stop, manager.exit_code


def main():
    run, n_trials, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    first, rows = 1, []
    for _ in range(n_trials):
        state = rng.getrandbits(32)
        stops = COMM.allgather(trial(run, first, random.Random(state)))
        saved = COMM.bcast(saved_step(latest(run)) if COMM.rank == 0 else None)
        rows.append({"stops": sorted(set(stops)), "saved": saved})
        first = max(step for step, _, _ in stops) + 1
    if COMM.rank == 0:
        (run.parent / "trials.json").write_text(json.dumps(rows))


main()
