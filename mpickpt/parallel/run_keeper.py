"""What rank 0 does to a run directory for a manager: lease, room, retention, rejects.

Everything here is local to rank 0, but for `retain`, which spreads the deleting.
"""

import json
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpickpt.errors import LeaseHeldError, StorageError
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.retention import (
    Candidate,
    KeepPolicy,
    plan_retention,
    plan_room,
)
from mpickpt.storage.filesystem import free_nbytes
from mpickpt.storage.lease import JobIdentity, Lease
from mpickpt.storage.removal import (
    remove_checkpoint,
    remove_directory_if_empty,
    remove_files,
    sweep_siblings,
    unpublish,
)
from mpickpt.storage.run_directory import RunDirectory, RunEntry

log = logging.getLogger(__name__)

PHASE = "retention"


class RunKeeper:
    """Keeps a run directory in order while this job writes to it.

    Parameters
    ----------
    path : Path
        The run directory.
    keep : KeepPolicy or None
        Which checkpoints stay; None keeps all.

    Attributes
    ----------
    good : set of int
        Steps that this run has saved, or loaded and verified.
    goes_on_from : int or None
        The restored step, until steps after it were set aside.
    """

    def __init__(self, path: Path, keep: KeepPolicy | None) -> None:
        self.run = RunDirectory(path)
        self.keep = keep
        self.good: set[int] = set()
        self.lease: Lease | None = None
        self.goes_on_from: int | None = None

    def become_writer(self) -> None:
        """Take the lease, if this job does not hold it; tidy up before the first save.

        What a crash left there is removed, and steps after the restored one are set
        aside.
        """
        if self.lease is None:
            self.lease = Lease.acquire(self.run.path, JobIdentity.current())
            sweep_siblings(self.run.path, set())
        self.lease.require()
        if self.goes_on_from is not None:
            self._set_aside(self.goes_on_from, {})
            self.goes_on_from = None

    def reject(self, reasons: dict[int, str]) -> bytes:
        """Set aside what a restore has passed over, unless another job writes here."""
        try:
            self.become_writer()
        except LeaseHeldError as error:
            log.warning("nothing is set aside: %s", error)
            return b""
        self._set_aside(None, reasons)
        return b""

    def require_lease(self) -> None:
        """Raise if another job has become the writer."""
        if self.lease is not None:
            self.lease.require()

    def release(self) -> None:
        """Let another job become the writer."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None

    def make_space(self, nbytes: int) -> None:
        """Remove the oldest checkpoints if the next one would not fit otherwise."""
        if self.keep is None or free_nbytes(self.run.path) >= nbytes:
            return
        entries = {entry.step: entry for entry in self.run.candidates()}
        plan = plan_room(
            self._candidates(entries.values()),
            self.keep,
            needed_nbytes=nbytes,
            free_nbytes=free_nbytes(self.run.path),
        )
        for step in plan.remove:
            self.require_lease()
            log.warning("removing step %d, to make room for the next save", step)
            remove_checkpoint(entries[step].path)
            self.run.forget(step)

    def retain(self, talk: Conversation) -> Steps[None]:
        """Remove what no rule keeps: manifests on rank 0, files spread over ranks.

        Notes
        -----
        A file that cannot be removed is a warning: the new checkpoint is safe.
        """
        if self.keep is None:
            return
        answer = yield from talk.on_root(self._unpublish_old, PHASE)
        directories = json.loads(answer)
        if not directories:
            return
        files = [Path(file) for listed in directories.values() for file in listed]
        mine = files[talk.rank :: talk.size]
        yield from talk.agree(lambda: _remove(mine), PHASE)
        yield from talk.agree(
            lambda: self._remove_directories(talk, directories), PHASE
        )

    def _unpublish_old(self) -> bytes:
        assert self.keep is not None
        entries = {entry.step: entry for entry in self.run.candidates()}
        listed: dict[str, list[str]] = {}
        for verdict in plan_retention(self._candidates(entries.values()), self.keep):
            if verdict.keep:
                continue
            self.require_lease()
            path = entries[verdict.step].path
            log.info("removing step %d: %s", verdict.step, verdict.reason)
            try:
                listed[str(path)] = [str(file) for file in unpublish(path)]
            except StorageError as error:
                log.warning("cannot remove step %d: %s", verdict.step, error)
            self.run.forget(verdict.step)
        return json.dumps(listed).encode()

    def _remove_directories(
        self, talk: Conversation, directories: dict[str, list[str]]
    ) -> None:
        if talk.rank == 0:
            for path in directories:
                remove_directory_if_empty(Path(path))

    def _set_aside(self, step: int | None, reasons: dict[int, str]) -> None:
        for entry in self.run.candidates():
            later = step is not None and entry.step > step
            if later or entry.step in reasons:
                reason = reasons.get(entry.step, f"the run went back to step {step}")
                log.warning("setting step %d aside: %s", entry.step, reason)
                self.run.reject(entry.step, reason)

    def _candidates(self, entries: Iterable[RunEntry]) -> list[Candidate]:
        return [
            Candidate(
                step=entry.step,
                is_pinned=entry.is_pinned,
                is_good=entry.step in self.good and entry.is_whole,
                metrics=entry.metrics,
                nbytes=entry.nbytes,
            )
            for entry in entries
        ]


def _remove(files: Sequence[Path]) -> None:
    try:
        remove_files(files)
    except StorageError as error:
        log.warning("cannot remove a file of an old checkpoint: %s", error)


def run_record() -> dict[str, Any]:
    """Return what the manifest says of the job that saved."""
    return {
        "host": socket.gethostname(),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "restart_count": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
    }
