"""MPI program: saves, replaces, prunes, sets aside and sweeps at a high rate.

``readers_writer.py RUN JOURNAL ACTIVITY STOP``: until the file STOP is there. Rank 0
notes in the journal what is published and removed, and when.
"""

import errno
import itertools
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import (
    CheckpointManager,
    SaveOptions,
    StorageError,
    save_sharded,
    step_path,
)
from mpickpt.parallel import retention, run_keeper
from mpickpt.storage import checkpoint_writer, removal, run_directory
from mpickpt.storage.lease import Lease
from tests.faults.readers_journal import JournalWriter
from tests.faults.soak_state import PureState

COMM = MPI.COMM_WORLD
RUN, JOURNAL, ACTIVITY, STOP = sys.argv[1:]
KEPT = 1  # so that what is being read is removed soon
OPTIONS = SaveOptions(timeout_s=60)
PAUSE_S = 0.15

state = PureState(COMM.rank, COMM.size)
dice = random.Random(ACTIVITY)


class QuickLease(Lease):
    """Beats often, so that who watches the holder need not wait long."""

    @classmethod
    def acquire(cls, *arguments: Any, **options: Any) -> Any:
        """Take the lease, as its base does."""
        return super().acquire(*arguments, **{"beat_s": 0.2, **options})


def keep_journal() -> None:
    """Have rank 0 note what becomes visible and what vanishes."""
    journal = JournalWriter(Path(JOURNAL))
    publish = checkpoint_writer.publish_manifest
    unpublish = removal.unpublish
    rename = run_directory.rename_durably

    def publish_noted(directory: Path, content: bytes) -> None:
        manifest = json.loads(content)
        version = manifest["metadata"].get("version", manifest["step"])
        with journal.publishing(directory.name, version):
            publish(directory, content)

    def unpublish_noted(directory: Path) -> Any:
        with journal.removing(directory.name):
            return unpublish(directory)

    def rename_noted(source: Path, target: Path) -> None:
        with journal.removing(source.name):
            rename(source, target)

    checkpoint_writer.publish_manifest = publish_noted
    removal.unpublish = retention.unpublish = unpublish_noted
    run_directory.rename_durably = rename_noted


def goes_on() -> bool:
    """Tell whether to go on, alike on all ranks."""
    return not COMM.bcast(os.path.exists(STOP))


def manager_of(**options: Any) -> CheckpointManager:
    options = {"keep": KEPT, "options": OPTIONS, **options}
    return CheckpointManager(RUN, COMM, state=state.tree, **options)


def prune() -> None:
    """Save step after step; each removes the oldest."""
    with manager_of() as manager:
        for step in itertools.count(1):
            state.advance(step)
            manager.save(step)
            manager.wait()
            time.sleep(dice.uniform(0, 0.02))
            if not goes_on():
                break


def overwrite() -> None:
    """Replace the checkpoints of two steps again and again; the content differs."""
    for version in itertools.count(1):
        state.advance(version)
        step = 1 + version % 2
        save_sharded(
            state.tree(),
            step_path(RUN, step),
            step=step,
            comm=COMM,
            metadata={"version": version},
            overwrite=True,
            options=OPTIONS,
        )
        time.sleep(dice.uniform(PAUSE_S / 2, PAUSE_S))
        if not goes_on():
            break


def reject() -> None:
    """Go back again and again: later steps are set aside, then saved anew."""
    with manager_of(asynchronous=False, keep=None) as manager:
        for step in range(1, 4):
            state.advance(step)
            manager.save(step)
        while goes_on():
            manager.rewind(2)
            for step in (3, 4):
                state.advance(step)
                manager.save(step)
                time.sleep(dice.uniform(0, 0.05))


def sweep() -> None:
    """Leave rubbish, fail, and begin anew, which sweeps."""
    pwrite = os.pwrite

    def no_space(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    steps = itertools.count(1)
    while goes_on():
        with manager_of(asynchronous=False) as manager:
            step = next(steps)
            state.advance(step)
            manager.save(step)
            failing = dice.randrange(COMM.size)
            os.pwrite = no_space if COMM.rank == failing else pwrite
            try:
                state.advance(step + 1)
                manager.save(step + 1)
            except StorageError:
                pass
            os.pwrite = pwrite
        if COMM.rank == 0:
            leave_rubbish(step)


def leave_rubbish(step: int) -> None:
    """Leave what a job leaves that died before it published."""
    for number in range(3):
        path = step_path(RUN, step + 100 + number)
        shutil.copytree(step_path(RUN, step), path, ignore=lambda *_: {"manifest.json"})


ACTIVITIES = {
    "prune": prune,
    "overwrite": overwrite,
    "reject": reject,
    "sweep": sweep,
}


def main() -> None:
    run_keeper.Lease = QuickLease
    if COMM.rank == 0:
        keep_journal()
    {"prune": prune, "overwrite": overwrite, "reject": reject, "sweep": sweep}[
        ACTIVITY
    ]()
    COMM.barrier()


main()
