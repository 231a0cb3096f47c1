"""What is done to a run while the power may go, and what must be there afterwards."""

import contextlib
import errno
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpickpt import (
    CheckpointManager,
    KeepLast,
    save_sharded,
    save_sharded_async,
    set_metrics,
    step_path,
)
from mpickpt.cli.main import main as cli
from mpickpt.errors import StorageError
from mpickpt.storage.catalog import read_manifest
from mpickpt.storage.halt_file import HaltFile
from mpickpt.storage.run_directory import RunDirectory
from tests.crash.small_state import SMALL_BLOCKS, flat, save, state_of

# By step: the value that tells which state was saved. None: damaged, to be refused.
Published = dict[int, int | None]
Promise = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Calls that change a run.

    Attributes
    ----------
    name : str
        A word.
    stages : tuple of Published
        What is published at the start, and after each promise: what is in two
        successive ones is there at every moment between the promises.
    act : callable
        ``act(run, comm, promise)`` on each rank; tells `promise` the stage that has
        come. With a `comm` of None it is called once.
    sets_aside : bool
        Whether what is published no more stays as a rejected directory.
    is_alone : bool
        Whether it is for one process without a communicator.
    may_stay : bool
        Whether what is published no more may stay: that it cannot be removed is a
        warning.
    again : {"save", "manager"}
        What the next start is: a save of the same path, or a manager.
    prepare : callable of Path, optional
        Done to the run after its first stage was saved.
    check : callable of (Path, int), optional
        Raises AssertionError where something else that was promised is not so.
    """

    name: str
    stages: tuple[Published, ...]
    act: Callable[[Path, Any, Promise], None]
    sets_aside: bool = False
    is_alone: bool = False
    may_stay: bool = False
    again: str = "manager"
    prepare: Callable[[Path], None] = lambda _run: None
    check: Callable[[Path, int], None] = lambda _run, _stage: None

    def between(self, stage: int) -> tuple[Published, Published]:
        """Return what is published before and after what is going on."""
        after = self.stages[min(stage + 1, len(self.stages) - 1)]
        return self.stages[stage], after

    def leftovers(self, stage: int) -> Published:
        """Return what may be published still, though it should be removed."""
        if not self.may_stay:
            return {}
        return {s: v for done in self.stages[:stage] for s, v in done.items()}


def make_run(scenario: Scenario, run: Path, size: int) -> None:
    """Make the run as it is before the scenario."""
    if not scenario.stages[0]:
        return
    for step, value in scenario.stages[0].items():
        path = step_path(run, step)
        save(path, step=step if value is None else value, size=size)
        if value is None:
            shard = path / read_manifest(path).shards[-1].path
            os.truncate(shard, 0)
    scenario.prepare(run)


def manager_at(run: Path, comm: Any, value: int, **options: Any) -> Any:
    """Return a manager and the function that sets the value of its state."""
    current = [value]
    manager = CheckpointManager(
        run,
        comm,
        state=lambda: state_of(comm.rank, current[0]),
        options=SMALL_BLOCKS,
        **options,
    )
    return manager, lambda new: current.__setitem__(0, new)


def require_restored(restored: Any, rank: int) -> None:
    """Assert that a restore gave the state that was saved."""
    value = restored.state["step"]
    assert flat(restored.state) == flat(state_of(rank, value)), "other bytes restored"


def _save_new(run: Path, comm: Any, promise: Promise) -> None:
    tree = state_of(comm.rank, 2)
    save_sharded(tree, step_path(run, 2), step=2, comm=comm, options=SMALL_BLOCKS)
    promise(1)


def _save_first(run: Path, comm: Any, promise: Promise) -> None:
    tree = state_of(comm.rank, 1)
    save_sharded(tree, step_path(run, 1), step=1, comm=comm, options=SMALL_BLOCKS)
    promise(1)


def _save_in_background(run: Path, comm: Any, promise: Promise) -> None:
    pending = save_sharded_async(
        state_of(comm.rank, 2),
        step_path(run, 2),
        step=2,
        comm=comm,
        options=SMALL_BLOCKS,
    )
    pending.result()
    promise(1)


def _overwrite(run: Path, comm: Any, promise: Promise) -> None:
    save_sharded(
        state_of(comm.rank, 11),
        step_path(run, 1),
        step=1,
        comm=comm,
        overwrite=True,
        options=SMALL_BLOCKS,
    )
    promise(1)


def _train(run: Path, comm: Any, promise: Promise) -> None:
    manager, set_value = manager_at(run, comm, 0, keep=KeepLast(2))
    with manager:
        require_restored(manager.restore_latest(), comm.rank)
        set_value(3)
        manager.save(3)
        manager.wait()
        promise(1)
        set_value(4)
        manager.save(4, wait=True)
        promise(2)


def _rewind(run: Path, comm: Any, promise: Promise) -> None:
    manager, set_value = manager_at(run, comm, 0)
    with manager:
        require_restored(manager.rewind(1), comm.rank)
        promise(1)
        set_value(12)
        manager.save(2, wait=True)
        promise(2)


def _fall_back(run: Path, comm: Any, promise: Promise) -> None:
    manager, _ = manager_at(run, comm, 0)
    with manager:
        require_restored(manager.restore_latest(), comm.rank)
        promise(1)


def _command(*arguments: str) -> None:
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        status = cli(list(arguments))
    text = said.getvalue()
    if status:
        named = next(
            (n for n in (errno.EIO, errno.EROFS) if os.strerror(n) in text), None
        )
        path = next((word for word in text.split() if word.startswith("/")), None)
        raise StorageError(f"{status}: {text}", errno=named, path=path)


def _prune(run: Path, _comm: Any, promise: Promise) -> None:
    _command("prune", str(run), "--keep-last", "1")
    promise(1)


def _remove(run: Path, _comm: Any, promise: Promise) -> None:
    _command("rm", str(step_path(run, 1)))
    promise(1)


def _say_of_step_1(run: Path) -> None:
    directory = RunDirectory(run)
    directory.note_attempt(1)
    directory.set_metrics(1, {"loss": 0.5})


def _pin_step_2(run: Path) -> None:
    RunDirectory(run).pin(2)
    set_metrics(run, 2, {"loss": 0.25})


def _control(run: Path, _comm: Any, promise: Promise) -> None:
    directory = RunDirectory(run)
    directory.pin(1)
    promise(1)
    directory.set_metrics(1, {"loss": 0.5})
    promise(2)
    HaltFile(run).write("enough")
    promise(3)
    directory.unpin(1)
    promise(4)
    HaltFile(run).remove()
    promise(5)


def _check_control(run: Path, stage: int) -> None:
    directory = RunDirectory(run)
    metrics = directory.candidates()[0].metrics
    assert metrics in ({}, {"loss": 0.5}), f"the metrics are {metrics}"
    if stage >= 2:
        assert metrics, "the metrics are gone"
    if 1 <= stage < 3:
        assert directory.pins() == [1], "the pin is gone"
    if stage == 3:
        assert HaltFile(run).reason == "enough", "the halt is gone"
    if stage >= 4:
        assert not directory.pins(), "the pin is back"
    if stage == 5:
        assert not HaltFile(run).exists, "the halt is back"


def _check_set_aside(run: Path, stage: int) -> None:
    if stage == 0:
        return
    rejected = RunDirectory(run).rejected()
    assert [entry.step for entry in rejected] == [2, 3], f"{rejected}"
    assert all(entry.reason for entry in rejected), "a reason is gone"
    assert rejected[0].is_pinned, "the pin did not go with it"


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(name="first", stages=({}, {1: 1}), act=_save_first),
        Scenario(
            name="sync", stages=({1: 1}, {1: 1, 2: 2}), act=_save_new, again="save"
        ),
        Scenario(name="async", stages=({1: 1}, {1: 1, 2: 2}), act=_save_in_background),
        Scenario(
            name="overwrite", stages=({1: 1}, {1: 11}), act=_overwrite, again="save"
        ),
        Scenario(
            name="manager",
            stages=({1: 1, 2: 2}, {2: 2, 3: 3}, {3: 3, 4: 4}),
            act=_train,
            prepare=_say_of_step_1,
            may_stay=True,
        ),
        Scenario(
            name="rewind",
            stages=({1: 1, 2: 2, 3: 3}, {1: 1}, {1: 1, 2: 12}),
            act=_rewind,
            sets_aside=True,
            prepare=_pin_step_2,
            check=_check_set_aside,
        ),
        Scenario(
            name="damaged",
            stages=({1: 1, 2: None}, {1: 1}),
            act=_fall_back,
            sets_aside=True,
        ),
        Scenario(
            name="prune",
            stages=({1: 1, 2: 2, 3: 3}, {3: 3}),
            act=_prune,
            is_alone=True,
            prepare=_say_of_step_1,
        ),
        Scenario(
            name="rm",
            stages=({1: 1, 2: 2}, {2: 2}),
            act=_remove,
            is_alone=True,
            prepare=_say_of_step_1,
        ),
        Scenario(
            name="control",
            stages=({1: 1},) * 6,
            act=_control,
            is_alone=True,
            check=_check_control,
        ),
    )
}
