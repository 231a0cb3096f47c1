"""MPI program: trains until it is told to stop, as a job under Slurm.

``preempted_run.py RUN [--steps N] [--await MOMENT] [--fault NAME] [--threads LEVEL]``

At its moment the rank of the environment's MPICKPT_TEST_RANK leaves a file and waits
until a signal has come, so that whoever sends it needs no luck.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import mpi4py

parser = argparse.ArgumentParser()
parser.add_argument("run", type=Path)
parser.add_argument("--steps", type=int, default=10_000)
parser.add_argument("--await", dest="moment")
parser.add_argument("--fault")
parser.add_argument("--threads", default="multiple")
options = parser.parse_args()
mpi4py.rc.thread_level = options.threads

from mpi4py import MPI  # noqa: E402

from mpickpt import EverySteps, Preemption  # noqa: E402
from mpickpt.parallel import pending, retention  # noqa: E402
from tests.training import Training, manager_of  # noqa: E402

COMM = MPI.COMM_WORLD
TARGET = int(os.environ.get("MPICKPT_TEST_RANK", "0"))
WAIT_S = 60.0
MOMENT_STEP = 6

preemption = Preemption(install=True)


def await_signal(moment, step):
    """Leave a file at the right moment and wait for a signal."""
    here = COMM.rank == TARGET and options.moment == moment and step == MOMENT_STEP
    if not here or preemption.is_requested:
        return
    signals = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        noticed = signal.getsignal(number)
        signal.signal(
            number, lambda n, f, seen=noticed: (signals.append(n), seen(n, f))
        )
    announce(f"at the moment {os.getpid()}")
    n_expected = 2 if moment == "twice" else 1
    end = time.monotonic() + WAIT_S
    while len(signals) < n_expected and time.monotonic() < end:
        time.sleep(0.001)


def announce(text):
    path = options.run.parent / "moment"
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


class Awaiting(Training):
    def state(self):
        await_signal("staging", self.step)
        return super().state()


def install_fault():
    """Die, or fail, at a named point."""
    if options.fault == "body" and COMM.rank == TARGET:
        return
    if options.fault == "die_after_unpublish":
        unpublish = retention.unpublish

        def unpublish_and_die(path):
            unpublish(path)
            os.kill(os.getpid(), signal.SIGKILL)

        retention.unpublish = unpublish_and_die
    if options.fault == "die_while_removing":
        remove_files = retention.remove_files

        def remove_one_and_die(paths):
            remove_files(list(paths)[:1])
            os.kill(os.getpid(), signal.SIGKILL)

        retention.remove_files = remove_one_and_die
    if options.fault == "die_in_the_background" and COMM.rank == TARGET:

        def die(_path, *_arguments):
            os.kill(os.getpid(), signal.SIGKILL)

        write = pending.write_staged_file
        pending.write_staged_file = lambda path, *rest: (
            die(path) if f"{MOMENT_STEP:010d}" in str(path) else write(path, *rest)
        )


def pass_around():
    """Exchange a message in a ring."""
    COMM.sendrecv(
        COMM.rank, dest=(COMM.rank + 1) % COMM.size, source=(COMM.rank - 1) % COMM.size
    )


def main():
    install_fault()
    training = Awaiting(COMM)
    with manager_of(
        options.run,
        COMM,
        training,
        keep=2,
        when=EverySteps(2),
        preemption=preemption,
    ) as manager:
        restored = manager.restore_latest()
        if restored is not None:
            training.adopt(restored)
            training.require_step(restored.step)
        for step in range(manager.next_step, options.steps):
            pass_around()
            training.train(step)
            await_signal("training", step)
            await_signal("twice", step)
            manager.save_if_due(step)
            await_signal("saving", step)
            if options.fault == "body" and COMM.rank == TARGET and step == MOMENT_STEP:
                raise RuntimeError("the body failed")
            if manager.should_stop:
                break
    report = {
        "first": None if restored is None else restored.step,
        "last": step,
        "code": manager.exit_code,
        "threads": MPI.Query_thread(),
        "progress": manager._saver._progress,
    }
    reports = COMM.gather(report)
    if COMM.rank == 0:
        (options.run.parent / "reports.json").write_text(json.dumps(reports))
    return manager.exit_code


sys.exit(main())
