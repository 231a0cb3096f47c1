"""What the cases of the network suite share: two jobs on two nodes, and judgements.

Runs on MPI ranks. Half of the ranks is on each node, and each half is a job of its own
too. What a rank finds wrong it notes and goes on, so that no other rank waits for it.
"""

import contextlib
import functools
import io
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpickpt import (
    CheckpointManager,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    SaveOptions,
    load_sharded,
    open_checkpoint,
    save_sharded,
    save_sharded_async,
)
from mpickpt.cli.main import main as command_line
from mpickpt.storage.catalog import step_path
from mpickpt.storage.verification import verify_checkpoint
from tests.crash.small_state import flat, state_of

TIMEOUT_S = 30.0
# Within this the view of the other node must have come right.
LATE_S = 5.0
ROWS = 5000
OPTIONS = SaveOptions(block_nbytes=64 << 10, timeout_s=TIMEOUT_S)
GONE = (CheckpointNotFoundError, IncompleteCheckpointError)

Notes = list[tuple[str, str]]


class Scene:
    """One case as a rank plays it.

    Parameters
    ----------
    node : int
        Number of this rank's node.
    run : Path
        Run directory of the case; not there yet.
    writer : int
        Node whose job writes, where only one does.

    Attributes
    ----------
    at : int
        The step that a manager saves.
    world, job, turned : Intracomm
        All ranks; those of this node; all with their order reversed, so that rank 0
        is on the other node.
    """

    def __init__(self, node: int, run: Path, writer: int = 0) -> None:
        self.world, self.job, self.turned = _communicators(node)
        self.node = node
        self.run = run
        self.is_writer = node == writer
        self.notes: Notes = []
        self.at = 0

    def note(self, column: str, text: str) -> None:
        """Note what is wrong, for a column of the verdict."""
        self.notes.append((column, f"rank {self.world.rank}: {text}"))

    def together(self) -> None:
        """Wait for all ranks."""
        self.world.barrier()

    @contextlib.contextmanager
    def expecting(self, what: str, column: str = "lost") -> Iterator[None]:
        """Note an error of the body instead of raising it."""
        try:
            yield
        except Exception as error:
            self.note(column, f"{what}: {type(error).__name__}: {error}")

    def require(self, condition: bool, text: str, column: str = "wrong_error") -> None:
        """Note the text unless the condition holds."""
        if not condition:
            self.note(column, text)

    def soon(self, look: Callable[[], bool], text: str, column: str) -> None:
        """Note the text unless the condition holds before long."""
        end = time.monotonic() + LATE_S
        with self.expecting(text, "wrong_error"):
            while not look():
                if time.monotonic() >= end:
                    self.note(column, text)
                    return
                time.sleep(0.02)

    def while_written(
        self, write: Callable[[], None], read: Callable[[], None]
    ) -> None:
        """Let the writer's job write; each rank of the other one reads until then."""
        if self.is_writer:
            with self.expecting("writing"):
                write()
            self.world.Ibarrier().Wait()
            return
        written = self.world.Ibarrier()
        while not written.Test():
            with self.expecting("reading meanwhile", "wrong_error"):
                read()

    def command(self, *words: str) -> None:
        """Run `mpickpt` with these words; note it if it fails."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = command_line(words)
        self.require(status == 0, f"{words[0]} ended with {status}: {said.getvalue()}")

    # Saving.

    def save(
        self,
        mode: str,
        step: int,
        comm: Any,
        *,
        path: Path | None = None,
        overwrite: bool = False,
    ) -> None:
        """Save a step of the run with these ranks: sync, async or by a manager."""

        def state() -> dict[str, Any]:
            return state_of(comm.rank, step, ROWS)

        path = path or step_path(self.run, step)
        if mode == "manager":
            with self.manager(comm) as manager:
                self.at = step
                manager.save(step)
            return
        arguments = {"step": step, "comm": comm, "overwrite": overwrite}
        if mode == "sync":
            save_sharded(state(), path, options=OPTIONS, **arguments)
            return
        pending = save_sharded_async(state(), path, options=OPTIONS, **arguments)
        assert pending is not None
        pending.result()

    def manager(self, comm: Any, **options: Any) -> CheckpointManager:
        """Return a manager of the run, whose state is that of the step `at`."""

        def state() -> dict[str, Any]:
            return state_of(comm.rank, self.at, ROWS)

        return CheckpointManager(
            self.run, comm, state=state, options=OPTIONS, **options
        )

    # Judging.

    def load(self, path: Path, comm: Any, **options: Any) -> Any:
        """Load a checkpoint with these ranks."""
        return load_sharded(path, comm=comm, timeout_s=TIMEOUT_S, **options)

    def require_loads(self, step: int, comm: Any, what: str) -> None:
        """Load a step with the ranks that saved it; note what is not as it was."""
        with self.expecting(what):
            tree = self.load(step_path(self.run, step), comm)
            self.require_state(tree, step, comm, what)

    def require_state(self, tree: Any, step: int, comm: Any, what: str) -> None:
        """Note it if a tree is not what this rank saved at a step."""
        same = flat(tree) == flat(state_of(comm.rank, step, ROWS))
        self.require(same, f"{what}: not the state of step {step}", "silent")

    def require_whole(self, step: int, size: int, what: str) -> None:
        """Verify and read a checkpoint on this rank alone."""
        with self.expecting(what):
            path = step_path(self.run, step)
            report = verify_checkpoint(path)
            errors = [str(file.error) for file in report.failures]
            self.require(not errors, f"{what}: verify: {errors}", "lost")
            with open_checkpoint(path) as checkpoint:
                tree = checkpoint.load()
            same = step_of(tree, size) == step
            self.require(same, f"{what}: not the state of step {step}", "silent")

    def read_any(self, path: Path, steps: Sequence[int], size: int) -> None:
        """Read on this rank alone what must be one of these steps, whole."""
        with open_checkpoint(path) as checkpoint:
            tree = checkpoint.load()
        step = step_of(tree, size)
        self.require(step in steps, f"read step {step}, not of {steps}", "silent")


def step_of(tree: Any, size: int) -> int | None:
    """Return the step whose state a whole tree is, None if it is no one step's."""
    step = tree["step"]
    saved = [state_of(rank, step, ROWS) for rank in range(size)]
    joined = {
        "model": {
            name: np.concatenate([state["model"][name].data for state in saved])
            for name in ("w", "half")
        },
        "scale": saved[0]["scale"],
        "own": [state["own"].data for state in saved],
        "step": step,
        "names": saved[0]["names"],
    }
    return step if flat(tree) == flat(joined) else None


@functools.cache
def _communicators(node: int) -> tuple[Any, Any, Any]:
    from mpi4py import MPI  # not where the cases are only listed

    world = MPI.COMM_WORLD
    return world, world.Split(node, world.rank), world.Split(0, -world.rank)
