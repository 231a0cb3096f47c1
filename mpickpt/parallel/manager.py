"""Keeps a training run alive: saves when due, restores, retains, and stops in time."""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.local_restore import restorer_of
from mpickpt.parallel.logs import log_as_asked
from mpickpt.parallel.options import SaveOptions
from mpickpt.parallel.pending import (
    OnBusy,
    Progress,
    known_on_busy,
    resolved_progress,
)
from mpickpt.parallel.preemption import Preemption
from mpickpt.parallel.restore import Restored
from mpickpt.parallel.run_keeper import RunKeeper
from mpickpt.parallel.run_saver import RunSaver
from mpickpt.parallel.run_tiers import OnStall, RunTiers
from mpickpt.parallel.waiting import run
from mpickpt.parallel.watch import Watch
from mpickpt.planning.interval import Trigger
from mpickpt.planning.retention import KeepPolicy, parse_keep
from mpickpt.planning.tiers import LocalTier, ObjectTier, Tier, tiers_of_run
from mpickpt.storage.catalog import checkpoints
from mpickpt.storage.halt_file import HaltFile
from mpickpt.storage.node_disk import own_directory
from mpickpt.storage.places import local_path

log = logging.getLogger(__name__)

_NO_STORE = "a save writes files; put the store into tiers=[...], behind a directory"

REQUEUE = 85  # what the batch scripts in slurm/ take as "requeue me"


class CheckpointManager:
    """Save, restore and retain the checkpoints of one run.

    Parameters
    ----------
    run_dir : path-like, optional
        Directory of the run, on a file system that all ranks see.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks; None is this process alone, without MPI.
    state : callable
        Returns the state tree; called when it is needed, so it is never stale.
    tiers : sequence of LocalTier, DirectoryTier, ObjectTier, optional
        In place of `run_dir`: levels of storage, the nearest first. Saves go to the
        first one; copies to the others are made in the background.
    keep : int, KeepPolicy or None
        Which checkpoints stay: an int means the last n; None keeps all. With `tiers`
        each has its own.
    when : Trigger or None
        When `save_if_due` saves: `EverySteps`, `EveryMinutes`, `YoungDaly`, joined
        by ``|``. None: only at a preemption.
    asynchronous : bool
        Whether training goes on while a save is written.
    progress : {"auto", "poll", "thread"}
        As in `save_sharded_async`.
    on_busy : {"wait", "skip", "error"}
        What a save does while the one before is under way.
    options : SaveOptions, optional
        How to write.
    metadata : dict, optional
        JSON values for every manifest.
    preemption : Preemption, optional
        Shared by several managers; by default this one has its own.
    max_attempts : int
        Restores of a step without progress after which it is passed over.
    max_lag : int
        Checkpoints that may be on their way to further tiers before the next save
        waits for one; for a tier that takes nothing it does not wait.

    Attributes
    ----------
    run_dir : Path
        Directory of the run in the first tier, as this rank sees it.
    next_step : int
        The step to go on with: 0 on the first run.
    should_stop : bool
        Whether to leave the loop; changes only inside `save_if_due`, at the same step
        on every rank.
    exit_code : int
        85 after a preemption, which asks the batch script to requeue, else 0.

    Notes
    -----
    Collective: every rank makes the same calls. Not thread-safe. To be used as a
    context manager: a normal end waits for the last save and raises what went wrong
    with it; after an exception the exit is local, and a save that was under way stays
    unpublished.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        comm: Any = None,
        *,
        state: Callable[[], Any],
        tiers: Sequence[Tier] | None = None,
        keep: KeepPolicy | int | None = None,
        when: Trigger | None = None,
        asynchronous: bool = True,
        progress: Progress = "auto",
        on_busy: OnBusy = "wait",
        options: SaveOptions | None = None,
        metadata: dict[str, Any] | None = None,
        preemption: Preemption | None = None,
        max_attempts: int = 3,
        max_lag: int = 2,
    ) -> None:
        log_as_asked()
        first, *further = tiers_of_run(run_dir, keep, tiers)
        local = first if isinstance(first, LocalTier) else None
        self.run_dir = _run_dir_of(first, is_template=tiers is not None)
        self.next_step = 0
        self.should_stop = False
        self.exit_code = 0
        self._asynchronous = asynchronous
        if when is not None and not isinstance(when, Trigger):
            raise TypeError(
                f"when={when!r}: expected EverySteps, EveryMinutes or YoungDaly, "
                "joined by |, or None"
            )
        options = options or SaveOptions()
        self._talks = conversations_of(comm, options.timeout_s)
        rules = None if first.keep is None else parse_keep(first.keep)
        self._keeper = RunKeeper(self.run_dir, rules)
        self._tiers = RunTiers(further, max_lag=max_lag)
        self._keeper.retention.held = self._tiers.held
        if self._talks.save.rank == 0:
            self._keeper.further = self._tiers.directories
        self._restorer = restorer_of(
            self._talks,
            self._keeper,
            local,
            self._tiers.runs,
            state=state,
            max_attempts=max_attempts,
        )
        self._leads = run(self._restorer.leads())
        if local is not None:
            self._keeper.retention.leads = self._leads
        self._saver = RunSaver(
            comm,
            self._talks,
            self._keeper,
            self._restorer,
            leads=self._leads,
            local=local,
            tiers=self._tiers,
            state=state,
            progress=resolved_progress(progress, comm),
            on_busy=known_on_busy(on_busy),
            options=options,
            metadata=metadata,
        )
        self._preemption = preemption or Preemption()
        self._preemption.open()
        self._watch = Watch(
            self._talks.step, when, self._preemption, HaltFile(self.run_dir)
        )
        self._is_open = True

    # Restoring.

    def restore_latest(
        self,
        *,
        required: bool | None = None,
        verify: str | None = None,
        reshard: bool = False,
        **options: Any,
    ) -> Restored | None:
        """Load the newest checkpoint that is whole, into the arrays of ``state()``.

        Parameters
        ----------
        required : bool, optional
            Whether it is an error that there is none. Default: only if Slurm says
            that this job was started before.
        verify, reshard, **options
            As in `load_sharded`.

        Returns
        -------
        Restored or None
            None where the run directory holds no checkpoint.

        Raises
        ------
        CheckpointError
            None of those that are there is whole, or the newest whole one does not
            fit the state.

        Notes
        -----
        Collective. A damaged checkpoint is passed over, and so is one that was
        restored by `max_attempts` programs, none of which did a step or came to
        `close`. What was passed over is set aside as ``step-….rejected-…`` before
        this returns, so that those steps can be saved again. While another job
        writes in the run directory, nothing is counted and nothing is set aside.
        """
        self.wait()
        restored = self._restorer.newest(
            required, verify=verify, reshard=reshard, **options
        )
        if restored is None:
            return None
        rejected = restored.rejected
        gave_up = any(newer > restored.step for newer in rejected)
        self._goes_on_from(restored, went_back=gave_up)
        self._on_each_node(lambda: self._keeper.reject(rejected), "reject")
        return restored

    def restore(self, step: int, **options: Any) -> Restored:
        """Load the checkpoint of one step; collective.

        Notes
        -----
        Later steps stay published until the next save, which sets them aside; a
        program that only evaluates changes nothing.
        """
        self.wait()
        return self._goes_on_from(self._restorer.one(step, **options), went_back=True)

    def rewind(self, step: int, **options: Any) -> Restored:
        """Load an earlier step and set all later ones aside, durably; collective."""
        restored = self.restore(step, **options)
        self._on_each_node(self._keeper.become_writer, "rewind")
        return restored

    # Saving.

    def save_if_due(
        self, step: int, *, metrics: Mapping[str, Any] | None = None
    ) -> bool:
        """Save this step if it is due; tell whether a save was begun.

        Parameters
        ----------
        step : int
            The step that was just done; each call a higher one.
        metrics : mapping, optional
            Of this step, for `KeepBest`; those of rank 0 count.

        Raises
        ------
        CheckpointError
            As `save`; what went wrong in the background is raised here too, on every
            rank at the same step.

        Notes
        -----
        Collective: every rank calls it equally often. Costs one small Iallreduce on a
        step that is not due. After a signal, a halt, or when the wall time runs out,
        it saves once more, waits for that, and sets `should_stop`.
        """
        self._require_open()
        if self._leads:
            self._keeper.note_step_done()
        with self._saver.telling_outcome():
            decision = self._watch.decide(step, has_failed=self._saver.poll())
        if decision.has_failed:
            self.wait()
        if decision.stop:
            return self._stop(step, metrics, halted=decision.halted)
        return decision.is_due and self.save(step, metrics=metrics)

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        wait: bool | None = None,
    ) -> bool:
        """Save this step now; tell whether a save was begun.

        Parameters
        ----------
        step : int
            The step that was just done.
        metrics : mapping, optional
            As in `save_if_due`.
        wait : bool, optional
            Whether to wait until it is durable. Default: not if `asynchronous`.

        Notes
        -----
        Collective. False where the save before is under way and `on_busy` is "skip".
        """
        self._require_open()
        wait = not self._asynchronous if wait is None else wait
        cost_s = self._saver.save(step, metrics, wait=wait)
        if cost_s is None:
            return False
        self._watch.saved(step, cost_s)
        return True

    def wait(self) -> None:
        """Wait until no save is under way; raise what went wrong with it; collective.

        Notes
        -----
        What was saved is durable when it returns.
        """
        self._saver.wait()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all copies have come to the further tiers; tell whether they have.

        Parameters
        ----------
        timeout_s : float, optional
            How long at most, in seconds.

        Raises
        ------
        CheckpointError
            On every rank, what went wrong for good with a copy since it was last told.
            Without `timeout_s` also why a tier refuses copies, if none went on for a
            minute: they may still come, or `mpickpt flush` goes on with them.

        Notes
        -----
        Collective; waits for the save in the background too.
        """
        self.wait()
        on_stall: OnStall = "raise" if timeout_s is None else "wait"
        tiers, talk = self._tiers, self._talks.save
        return run(tiers.flushed(talk, timeout_s, on_stall=on_stall))

    # The run directory.

    def steps(self) -> list[int]:
        """Return the published steps, the lowest first; local, reads the directory.

        Those of the first tier.
        """
        return [entry.step for entry in checkpoints(self.run_dir)]

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step in the first tier, whatever `keep` says.

        Collective.
        """
        self._on_each_node(lambda: self._keeper.run.pin(step), "pin")

    # The end.

    def close(self) -> None:
        """Wait for the last save and its copies, and let another job write; collective.

        Notes
        -----
        After a preemption it waits for copies only if the wall time is enough for them,
        and raises nothing about a tier that only refuses for now: the job is requeued.
        """
        if not self._is_open:
            return
        try:
            with self._saver.telling_outcome():
                self._watch.finish()
            self.wait()
            left_s = self._preemption.time_left_s() if self._leads else math.inf
            on_stall: OnStall = "leave" if self.exit_code == REQUEUE else "raise"
            run(self._tiers.drain(self._talks.save, left_s, on_stall=on_stall))
            if self._leads:
                self._keeper.take_back_attempt()
        finally:
            self._close_locally()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or not self._is_open:
            self.close()
            return
        try:
            self._saver.abandon()
        finally:
            self._close_locally()

    def _require_open(self) -> None:
        if not self._is_open:
            raise ValueError("the manager was closed")

    def _close_locally(self) -> None:
        self._is_open = False
        self._preemption.close()
        self._tiers.close(tells=self._talks.save.rank == 0)
        if self._leads:
            self._keeper.release()

    def _on_each_node(self, call: Callable[[], object], phase: str) -> None:
        """Call where a run directory is looked after: on rank 0, or on each node."""
        run(self._restorer.on_each_node(call, phase))

    def _stop(
        self, step: int, metrics: Mapping[str, Any] | None, *, halted: bool
    ) -> bool:
        """Save once more, durably, and ask the loop to end."""
        self.wait()
        is_new = self._saver.last_step != step
        if is_new:
            self.save(step, metrics=metrics, wait=True)
        self.should_stop = True
        self.exit_code = 0 if halted else REQUEUE
        if self._talks.save.rank == 0:
            why = "halted" if halted else "preempted"
            log.warning("%s: step %d is saved, stopping", why, step)
        return is_new

    def _goes_on_from(self, restored: Restored, *, went_back: bool) -> Restored:
        self.next_step = restored.step + 1
        self._saver.goes_on_from(restored.step, restored.manifest, went_back=went_back)
        self._keeper.goes_on_from = restored.step
        self._watch.restored(restored.step)
        return restored


def _run_dir_of(first: Tier, *, is_template: bool) -> Path:
    assert not isinstance(first, ObjectTier)
    path = local_path(first.path, _NO_STORE)
    return own_directory(path) if is_template else Path(os.path.abspath(path))
