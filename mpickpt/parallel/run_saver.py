"""Saves the steps of one run: in the background or at once, then retains."""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpickpt.errors import CollectiveTimeoutError
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.communicators import Conversations
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.describe import memory_of
from mpickpt.parallel.local_restore import LocalRestorer
from mpickpt.parallel.node_save import on_nodes
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.parallel.pending import OnBusy, begin_save
from mpickpt.parallel.pending_save import PendingSave, pending_of
from mpickpt.parallel.run_keeper import RunKeeper
from mpickpt.parallel.run_restorer import RunRestorer
from mpickpt.parallel.run_tiers import RunTiers
from mpickpt.parallel.save import save_at_once
from mpickpt.parallel.save_call import SaveCall, nothing_published
from mpickpt.parallel.save_record import manifest_of_shards
from mpickpt.parallel.save_steps import Save
from mpickpt.parallel.waiting import Steps, run
from mpickpt.planning.tiers import LocalTier
from mpickpt.storage.catalog import read_manifest, step_path
from mpickpt.storage.places import is_there

_N_SAVES = "saves"  # of the run, this one included: every n-th goes to a further tier


class RunSaver:
    """Saves steps of one run, one at a time.

    Parameters
    ----------
    comm, talks
        The ranks.
    keeper : RunKeeper
        Of the run directory.
    restorer : RunRestorer or LocalRestorer
        Knows who looks after which run directory.
    leads : bool
        Whether this rank does.
    local : LocalTier or None
        The first tier, if it is the disk of each node.
    tiers : RunTiers
        The tiers behind the first one.
    state, progress, on_busy, options, metadata
        As in `CheckpointManager`; `progress` is resolved.

    Attributes
    ----------
    last_step : int or None
        The step that was saved, or restored, last.
    """

    def __init__(
        self,
        comm: Any,
        talks: Conversations,
        keeper: RunKeeper,
        restorer: RunRestorer | LocalRestorer,
        *,
        leads: bool,
        local: LocalTier | None,
        tiers: RunTiers,
        state: Callable[[], Any],
        progress: str,
        on_busy: OnBusy,
        options: SaveOptions,
        metadata: dict[str, Any] | None,
    ) -> None:
        self.last_step: int | None = None
        self._comm = comm
        self._talks = talks
        self._keeper = keeper
        self._restorer = restorer
        self._leads = leads
        self._local = local
        self._tiers = tiers
        self._n_saves = 0
        self._went_back_to: int | None = None
        self._restored: ShardManifest | None = None
        self._state = state
        self._progress = progress
        self._on_busy = on_busy
        self._options = options
        self._metadata = metadata
        self._pending: PendingSave | None = None
        self._ran_before_s: float | None = None

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._keeper.run.path

    def goes_on_from(
        self, step: int, manifest: ShardManifest, *, went_back: bool
    ) -> None:
        """Note that a step was restored, and what the run had done by then.

        Parameters
        ----------
        step, manifest
            Of the checkpoint.
        went_back : bool
            Whether later steps were given up. Else there is none, or a tier that did
            not answer has one that nobody has given up.

        Notes
        -----
        What the run took before this process is what the first restore says: to go
        back later takes no time off.
        """
        self.last_step = step
        self._went_back_to = step if went_back else None
        self._restored = manifest
        n_saves = manifest.run.get(_N_SAVES)
        self._n_saves = n_saves if isinstance(n_saves, int) else 0
        if self._ran_before_s is None:
            self._ran_before_s = manifest.wall_clock_seconds

    def poll(self) -> bool:
        """Let the save in the background go on; tell whether it has failed."""
        pending = self._pending
        return pending is not None and pending.poll() and pending.has_failed

    def save(
        self, step: int, metrics: Mapping[str, Any] | None, *, wait: bool
    ) -> float | None:
        """Save a step; return for how long the program waited, None if skipped.

        Parameters
        ----------
        step, metrics
            As in `CheckpointManager.save`.
        wait : bool
            Whether to wait until it is durable.
        """
        with nothing_published():
            run(self._made_ready(step))
        begin = time.monotonic()
        call = self._call(step, metrics)
        if wait:
            self.wait()
            run(self._saved_at_once(call))
        elif not self._begin(call):
            return None
        self.last_step = step
        return time.monotonic() - begin

    def wait(self) -> None:
        """Wait until no save is under way; raise what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.settle()

    @contextmanager
    def telling_outcome(self) -> Iterator[None]:
        """Say in a time-out what the save in the background came to, if there is one.

        Notes
        -----
        That one was given up too, so it ends soon.
        """
        try:
            yield
        except CollectiveTimeoutError as error:
            if error.outcome is None and self._pending is not None:
                self._pending.finish()
                error.outcome = self._pending.outcome
            raise

    def abandon(self) -> None:
        """Leave a save that is under way unpublished; local."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()

    def _made_ready(self, step: int) -> Steps[None]:
        """Take the lease, tidy up, and wait for further tiers that lag too far."""
        yield from self._restorer.on_each_node(
            lambda: self._become_writer(step), "lease"
        )
        back, self._went_back_to = self._went_back_to, None
        if back is not None and self._tiers:
            yield from self._talks.save.on_root(
                lambda: self._tiers.set_aside_after(back), "lease"
            )
        self._copy_restored()
        yield from self._tiers.await_turn(self._talks.save)

    def _become_writer(self, step: int) -> bytes:
        earlier = pending_of(self._talks)
        under_way = {}
        if earlier is not None and not earlier.done:
            under_way[earlier.step] = earlier.path
        return self._keeper.become_writer(step, under_way=under_way)

    def _begin(self, call: SaveCall) -> bool:
        if self._pending is not self._talks.memory.get("pending"):
            self.wait()  # ended since, for a save of somebody else
        pending = begin_save(
            self._talks,
            call,
            progress=self._progress,
            on_busy=self._on_busy,
            owner=self,
            after=self._after_publish,
        )
        if pending is not None:
            self._pending = pending
        return pending is not None

    def _saved_at_once(self, call: SaveCall) -> Steps[None]:
        talk = self._talks.save
        memory = memory_of(self._talks.memory, call.run_key)
        result = yield from save_at_once(Save(talk, memory, call))
        yield from self._after_publish(talk, result)

    def _after_publish(self, talk: Conversation, result: SaveResult) -> Steps[None]:
        """Forget attempts, since there was progress; copy; remove what is too old."""
        self._keeper.retention.good.add(result.step)
        self._n_saves += 1
        if self._leads:
            self._keeper.forget_attempts()
        if self._tiers:
            self._copy(talk.rank, result)
        try:
            yield from self._keeper.retention.apply(talk, result.step)
        except CollectiveTimeoutError as error:
            error.outcome = "unknown"  # not "unpublished", to be exact
            raise

    def _copy(self, rank: int, result: SaveResult) -> None:
        if rank == 0:
            manifest = read_manifest(result.path)
        else:
            manifest = manifest_of_shards(result)
        self._tiers.copy(manifest, result.path, [rank], n_saves=self._n_saves)

    def _copy_restored(self) -> None:
        """Go on with the copies of what was restored, which a start did not finish."""
        manifest, self._restored = self._restored, None
        if manifest is None or not self._tiers:
            return
        source = step_path(self.run_dir, manifest.step)
        rank, size = self._talks.save.rank, self._talks.save.size
        is_spread = self._local is not None and manifest.world_size != size
        if not is_spread and is_there(source / MANIFEST_NAME):
            ranks = range(rank, manifest.world_size, size)
            self._tiers.copy(manifest, source, ranks, n_saves=self._n_saves)

    def _call(self, step: int, metrics: Mapping[str, Any] | None) -> SaveCall:
        if self._ran_before_s is None:
            self._ran_before_s = 0.0
        call = SaveCall(
            state=self._state,
            directory=step_path(self.run_dir, step),
            step=step,
            metadata=self._metadata,
            metrics=None if metrics is None else _plain(metrics),
            overwrite=False,
            options=self._options,
            comm=self._comm,
            run=_run_record(self._n_saves + 1),
            ran_before_s=self._ran_before_s,
            before_publish=self._keeper.require_lease,
            make_space=self._keeper.retention.make_space,
        )
        if self._local is None:
            return call
        return on_nodes(call, self._local.path, copies=self._local.copies)


def _run_record(n_saves: int) -> dict[str, Any]:
    """Return what the manifest says of the job that saved."""
    return {
        _N_SAVES: n_saves,
        "host": socket.gethostname(),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "restart_count": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics with Python's numbers for numpy's."""
    return {
        name: value.item() if hasattr(value, "item") else value
        for name, value in metrics.items()
    }
