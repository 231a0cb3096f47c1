"""What rank 0 does to a run directory for a manager: lease, attempts, rejects.

Everything here is local to rank 0.
"""

import errno
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpickpt.errors import LeaseHeldError, StorageError
from mpickpt.parallel.retention import EARLIER_STEP, Retention
from mpickpt.planning.retention import KeepPolicy
from mpickpt.storage.lease import Lease, is_written_by_another
from mpickpt.storage.removal import remove_old_rejected
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.run_entry import RunEntry
from mpickpt.storage.sweep import sweep_siblings

log = logging.getLogger(__name__)

_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)

# As long as `mpickpt prune` may take while the job makes its first save.
LEASE_PATIENCE_S = 30.0


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
    retention : Retention
        Removes what need not stay.
    goes_on_from : int or None
        The restored step, until steps after it were set aside.
    further : sequence of Path
        The run directories of further tiers, to which no other job may copy meanwhile.
    """

    def __init__(self, path: Path, keep: KeepPolicy | None) -> None:
        self.run = RunDirectory(path)
        self.retention = Retention(self.run, keep, self.require_lease)
        self.lease: Lease | None = None
        self.goes_on_from: int | None = None
        self.further: Sequence[Path] = ()
        self._further_leases: list[Lease] = []
        self._reasons: dict[int, str] = {}
        self._attempted: int | None = None
        self._only_reads = False
        self._seen: dict[int, str | None] | None = None

    def look_for_writer(self) -> bytes:
        """Find out whether another job writes here; it may have to be watched a while.

        Notes
        -----
        To be called before the checkpoints are listed: that job may have removed by
        then what was listed before.
        """
        self._only_reads = self.lease is None and is_written_by_another(self.run.path)
        return b""

    def look(self) -> list[RunEntry]:
        """Return the published checkpoints, and remember which they were."""
        entries = self.run.candidates()
        self._seen = {entry.step: entry.checkpoint_id for entry in entries}
        return entries

    def become_writer(
        self,
        saving: int | None = None,
        *,
        patience_s: float | None = None,
        under_way: Mapping[int, Path] | None = None,
    ) -> bytes:
        """Take the lease, if this job does not hold it; tidy up before the first save.

        Parameters
        ----------
        saving : int, optional
            The step that is going to be saved.
        patience_s : float, optional
            How long to wait for a living holder.
        under_way : mapping of int to Path, optional
            Saves that have not ended yet: steps and their directories.

        Notes
        -----
        What a crash left there is removed, and what was left by a save, or by a
        retention, of which not all went well; what a restore has passed over, and
        steps after the restored one, are set aside.
        """
        if self.lease is None:
            if patience_s is None:
                patience_s = LEASE_PATIENCE_S
            self.lease = Lease.acquire(self.run.path, patience_s=patience_s)
            self._only_reads = False
            self._require_nothing_new()
            self._take_further_leases(patience_s)
            self.retention.untidy.add(EARLIER_STEP)
        self.lease.require()
        if self.retention.untidy:
            spared = under_way or {}
            sweep_siblings(self.run.path, set(), sparing=spared.values())
            self.retention.untidy &= spared.keys()
        if saving is not None:
            self.retention.untidy.add(saving)  # until it has ended well
        if self.goes_on_from is not None:
            self._set_aside_after(self.goes_on_from)
            self.goes_on_from = None
        return b""

    def reject(self, reasons: Mapping[int, str]) -> bytes:
        """Set aside what a restore has passed over, unless another job writes here.

        Parameters
        ----------
        reasons : mapping of int to str
            Steps, with what is wrong with each.
        """
        self._reasons = dict(reasons)
        if not reasons:
            return b""
        try:
            self.become_writer(patience_s=0.0)
        except LeaseHeldError as error:
            log.warning("nothing is set aside: %s", error)
        except StorageError as error:
            if error.errno not in _NOT_ALLOWED:
                raise
            log.warning("nothing is set aside, for this may only read: %s", error)
        return b""

    def note_attempt(self, step: int) -> bytes:
        """Count a restore of a step, unless `look_for_writer` found another job.

        Notes
        -----
        Taken back when the program ends well: it did not die of the step. What may
        only read, or reads while another job trains, leaves no trace.
        """
        self.take_back_attempt()
        if self._only_reads:
            return b""
        try:
            self.run.note_attempt(step)
        except StorageError as error:
            log.warning("the restore of step %d is not counted: %s", step, error)
        else:
            self._attempted = step
        return b""

    def take_back_attempt(self, step: int | None = None) -> None:
        """Uncount the restore that was counted last, if it was of this step."""
        if self._attempted is not None and step in (None, self._attempted):
            try:
                self.run.take_back_attempt(self._attempted)
            except StorageError as error:
                log.warning("a restore stays counted: %s", error)
        self._attempted = None

    def note_step_done(self) -> None:
        """Forget all restores at the first step after one: the program did not die."""
        if self._attempted is not None:
            self.forget_attempts()

    def forget_attempts(self) -> None:
        """Forget all restores: there was progress since."""
        self._attempted = None
        try:
            self.run.clear_attempts()
        except StorageError as error:
            log.warning("restores stay counted: %s", error)

    def _require_nothing_new(self) -> None:
        """Raise if another job has saved since this one looked what to go on from.

        Its steps would be set aside, and trained again, by a job that waited for it.
        """
        now = {entry.step: entry.checkpoint_id for entry in self.run.candidates()}
        seen = now if self._seen is None else self._seen
        # A manifest that cannot be read just now is none that somebody has written.
        new = sorted(
            step
            for step, found in now.items()
            if step not in seen or _differ(found, seen[step])
        )
        if new:
            self.release()
            raise LeaseHeldError(
                f"another job has saved step {new[-1]} in {self.run.path} since this "
                "one looked what to go on from; start again, to go on from there",
                path=str(self.run.path),
            )

    def require_lease(self) -> None:
        """Raise if another job has become the writer."""
        for lease in (self.lease, *self._further_leases):
            if lease is not None:
                lease.require()

    def release(self) -> None:
        """Let another job become the writer."""
        if self.lease is not None:
            self.lease.release()
            self.lease = None
        while self._further_leases:
            self._further_leases.pop().release()

    def _take_further_leases(self, patience_s: float) -> None:
        """Keep other jobs from the further tiers; one that refuses guards nothing."""
        for path in self.further:
            try:
                lease = Lease.acquire(path, patience_s=patience_s)
            except LeaseHeldError:
                self.release()
                raise
            except StorageError as error:
                log.warning("no lease keeps other jobs from %s: %s", path, error)
            else:
                self._further_leases.append(lease)

    def _set_aside_after(self, step: int) -> None:
        # A step that was passed over here may have come from a further tier.
        later = [
            entry
            for entry in self.run.candidates()
            if entry.step > step or entry.step in self._reasons
        ]
        if later:
            remove_old_rejected(self.run)  # a run may go back any number of times
        for entry in later:
            again = f"the run went back to step {step}"
            reason = self._reasons.get(entry.step, again)
            log.warning("setting step %d aside: %s", entry.step, reason)
            self.run.reject(entry.step, reason)
            self.retention.good.discard(entry.step)


def _differ(one: str | None, other: str | None) -> bool:
    return None not in (one, other) and one != other
