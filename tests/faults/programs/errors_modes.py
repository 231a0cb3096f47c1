"""The ways to save that the errors suite fails: what is before, the save, the next.

Each mode works in a run directory of its own copy of a template. Step 1 is published
there before, and every file name is the same at every run.
"""

import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import (
    CheckpointManager,
    SaveOptions,
    load_sharded,
    save_sharded,
    save_sharded_async,
    set_metrics,
)
from mpickpt.storage import staging, stream
from mpickpt.storage.catalog import step_path
from tests.crash.small_state import flat, state_of

COMM = MPI.COMM_WORLD
ROWS = 5000  # 80 kB a rank: four writes of blocks, and the rest
OPTIONS = SaveOptions(block_nbytes=16 << 10, timeout_s=30)


def name_files_alike() -> Callable[[], None]:
    """Number ids and temporary names; return what begins the count anew."""
    count = [0]

    def token_hex(nbytes: int) -> str:
        count[0] += 1
        return f"{count[0]:08d}".ljust(2 * nbytes, "0")

    def restart() -> None:
        count[0] = 1000  # beyond those of the template

    secrets.token_hex = token_hex
    # strace counts in each thread by itself.
    stream._IN_FLIGHT = staging._WRITES_IN_FLIGHT = 1
    return restart


def save(run: Path, step: int, *, value: int | None = None, **options: Any) -> None:
    """Save the state of a step, or of another one there."""
    state = state_of(COMM.rank, step if value is None else value, ROWS)
    path = step_path(run, step)
    save_sharded(state, path, step=step, comm=COMM, options=OPTIONS, **options)


def load(run: Path, step: int) -> int:
    """Load, compare every byte with what was saved, and return whose state it is."""
    tree = load_sharded(step_path(run, step), comm=COMM, timeout_s=30)
    value: int = tree["step"]
    assert flat(tree) == flat(state_of(COMM.rank, value, ROWS)), "other bytes"
    return value


class AtOnce:
    """`save_sharded`, to a new directory."""

    name = "sync"
    old, new = (1, 1), (2, 2)
    loads_also: tuple[int, ...] = ()

    def make_template(self, run: Path) -> None:
        """Publish what is there before."""
        save(run, 1)

    def begin(self, run: Path) -> None:
        """Do what comes before the fault."""
        self.run = run

    def save(self) -> None:
        """Save, with the fault."""
        save(self.run, 2)

    def again(self) -> None:
        """Save once more, without one."""
        save(self.run, 2, value=3, overwrite=True)

    def end(self) -> None:
        """Do what comes after."""

    @property
    def last(self) -> tuple[int, int]:
        """The step that `again` saves, and whose state it is."""
        return self.new[0], 3


class Overwriting(AtOnce):
    """`save_sharded` over the checkpoint of before."""

    name = "overwrite"
    old, new = (1, 1), (1, 2)

    def save(self) -> None:
        save(self.run, 1, value=2, overwrite=True)

    def again(self) -> None:
        save(self.run, 1, value=3, overwrite=True)


class InBackground(AtOnce):
    """`save_sharded_async`, driven by polls or by a thread."""

    def __init__(self, progress: str) -> None:
        self.name = self.progress = progress

    def save(self) -> None:
        pending = save_sharded_async(
            state_of(COMM.rank, 2, ROWS),
            step_path(self.run, 2),
            step=2,
            comm=COMM,
            options=OPTIONS,
            progress=self.progress,  # type: ignore[arg-type]
        )
        assert pending is not None
        while self.progress == "poll" and not pending.poll():
            time.sleep(1e-4)
        pending.result()


class Managed(AtOnce):
    """A manager's first save: lease, attempts, retention of step 1, its metrics."""

    old, new, last = (2, 2), (3, 3), (4, 4)  # type: ignore[assignment]
    keep: int | None = 2

    def __init__(self, name: str, *, wait: bool) -> None:
        self.name = name
        self.wait = wait

    def make_template(self, run: Path) -> None:
        save(run, 1)
        save(run, 2)
        if COMM.rank == 0:
            set_metrics(run, 1, {"loss": 1.0})
        COMM.barrier()

    def begin(self, run: Path) -> None:
        self.run, self.step = run, 2
        self.manager = CheckpointManager(
            run,
            COMM,
            state=lambda: state_of(COMM.rank, self.step, ROWS),
            keep=self.keep,
            options=OPTIONS,
            progress="thread",
        )
        self.restore()

    def restore(self) -> None:
        """Restore what the save goes on from."""
        assert self.manager.restore_latest() is not None

    def save(self) -> None:
        self.step = 3
        self.manager.save(3, wait=self.wait)
        self.manager.wait()

    def again(self) -> None:
        self.step = 4
        self.manager.save(4, wait=True)

    def end(self) -> None:
        self.manager.close()


class Rewound(Managed):
    """A manager's save after it went back to step 1: step 2 is set aside."""

    old = (1, 1)
    keep = None

    def restore(self) -> None:
        self.manager.restore(1)


MODES = (
    AtOnce(),
    Overwriting(),
    InBackground("poll"),
    InBackground("thread"),
    Managed("manager", wait=True),
    Managed("background", wait=False),
    Rewound("rewind", wait=True),
)


def fresh_copies(mode: AtOnce, folder: Path) -> Iterator[Path]:
    """Make the mode's template; yield a copy of it, ever the same path, for a case."""
    template, run = folder / "template", folder / "run"
    mode.make_template(template)
    while True:
        if COMM.rank == 0:
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(template, run, symlinks=True)
        COMM.barrier()
        yield run
