"""The tiers behind the first one: what is copied there, and whether it has come there.

Each rank copies in the background what lies with it, without MPI. Only what all ranks
have to know alike is told here: whether to wait, and what went wrong.
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mpickpt.errors import CheckpointError
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.pace_of_bytes import BytePace
from mpickpt.planning.retention import KeepPolicy, parse_keep
from mpickpt.planning.tiers import (
    DirectoryTier,
    LocalTier,
    ObjectTier,
    Tier,
    rate_of,
)
from mpickpt.storage.node_disk import own_directory
from mpickpt.storage.places import Place, absolute
from mpickpt.storage.tier_retention import remove_surplus, set_aside_after
from mpickpt.storage.uploader import Uploader, UploadTarget

log = logging.getLogger(__name__)

PHASE = "copies"

OnStall = Literal["raise", "leave", "wait"]

# A tier that takes nothing for so long does not hold up the program any longer.
STALL_S = 60.0
_LOOK_S = 0.5


class RunTiers:
    """Copies the checkpoints of a run to further tiers.

    Parameters
    ----------
    tiers : sequence of DirectoryTier or ObjectTier
        Those behind the first one, the nearest first.
    max_lag : int
        Checkpoints that may be on their way before a save waits.

    Attributes
    ----------
    runs : tuple of Path or RemotePath
        The run in each tier.
    """

    def __init__(self, tiers: Sequence[Tier], *, max_lag: int) -> None:
        if isinstance(max_lag, bool) or not isinstance(max_lag, int) or max_lag < 1:
            raise ValueError(f"max_lag is {max_lag!r}; expected an int from 1")
        self._tiers = [tier for tier in tiers if not isinstance(tier, LocalTier)]
        self.runs: tuple[Place, ...] = tuple(map(_place, self._tiers))
        self._max_lag = max_lag
        self._targets = [
            UploadTarget(run=run, pace=BytePace(rate_of(tier)))
            for run, tier in zip(self.runs, self._tiers, strict=True)
        ]
        self._rules: list[KeepPolicy | None] = [
            None if tier.keep is None else parse_keep(tier.keep) for tier in self._tiers
        ]
        self._good: list[set[int]] = [set() for _ in self._tiers]
        self._failures: list[CheckpointError] = []
        self._stalled_at: int | None = None
        self._uploader = Uploader(self._targets, on_published=self._published)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._tiers)

    @property
    def directories(self) -> list[Path]:
        """The runs in those tiers that are directories."""
        return [run for run in self.runs if isinstance(run, Path)]

    def copy(
        self,
        manifest: ShardManifest,
        source: Path,
        ranks: Sequence[int],
        *,
        n_saves: int,
    ) -> None:
        """Have a checkpoint copied to the tiers whose turn it is; local.

        Parameters
        ----------
        manifest : ShardManifest
            Of the checkpoint; on ranks other than 0 it need not list the arrays.
        source : Path
            Its directory in the first tier.
        ranks : sequence of int
            Whose shards this rank copies; who copies that of 0 publishes.
        n_saves : int
            How many checkpoints the run has saved, this one included.
        """
        due = [
            target
            for target, tier in zip(self._targets, self._tiers, strict=True)
            if n_saves % tier.every == 0
        ]
        if due:
            self._uploader.submit(manifest, source, ranks, publishes=0 in ranks, to=due)

    def held(self) -> set[int]:
        """Return the steps that have to stay in the first tier to be copied; local.

        Notes
        -----
        Of a tier that lags without end not more than twice `max_lag`, or the first
        tier would fill up; the copies of older ones fail, and that is told.
        """
        return set(sorted(self._uploader.holds())[-2 * self._max_lag :])

    def await_turn(self, talk: Conversation) -> Steps[None]:
        """Wait while too many checkpoints are on their way; collective.

        Notes
        -----
        Rank 0 publishes all copies, so it knows. A tier that takes nothing for a
        minute is waited for no longer.
        """
        if not self._tiers:
            return
        self._tell_failures()
        lags = yield from talk.on_root(lambda: bytes([self._lags()]), PHASE)
        if lags != b"\0":
            yield from self._waited(talk, self._max_lag, None, "leave")

    def flushed(
        self, talk: Conversation, timeout_s: float | None, *, on_stall: OnStall
    ) -> Steps[bool]:
        """Wait until all copies are made; tell whether they are; collective.

        Parameters
        ----------
        timeout_s : float or None
            How long at most, in seconds.
        on_stall : {"raise", "leave", "wait"}
            What to do when a tier refuses copies and none went on for a minute.

        Raises
        ------
        CheckpointError
            On every rank, what went wrong for good with a copy since it was last told;
            or why the tier refuses.
        """
        if not self._tiers:
            return True
        yield from self._waited(talk, 0, timeout_s, on_stall)
        yield from self._failures_told(talk, on_stall)
        left = yield from talk.on_root(lambda: bytes([self._uploader.lag > 0]), PHASE)
        return left == b"\0"

    def set_aside_after(self, step: int) -> bytes:
        """Take the steps that the run went back from out of all tiers; on rank 0."""
        for run in self.runs:
            set_aside_after(run, step)
        return b""

    def drain(
        self, talk: Conversation, left_s: float, *, on_stall: OnStall
    ) -> Steps[None]:
        """Finish the copies if the time is enough for them, and say so; collective.

        Parameters
        ----------
        left_s : float
            Wall time left on rank 0, in seconds; infinity without a limit.
        on_stall
            As in `flushed`.
        """
        if not self._tiers:
            return
        verdict = yield from talk.on_root(lambda: self._verdict(left_s), PHASE)
        if verdict != b"leave":
            limit_s = None if verdict == b"finish" else float(verdict)
            yield from self.flushed(talk, limit_s, on_stall=on_stall)
        else:
            yield from self._failures_told(talk, on_stall)

    def close(self, *, tells: bool) -> None:
        """End without finishing; local. One rank tells what `mpickpt flush` is for."""
        for state in self._uploader.close(drain=False):
            if tells and state.target and state.phase != "done":
                log.warning(
                    "step %d has not come to %s: mpickpt flush goes on with it",
                    state.step,
                    state.target.run,
                )

    def _failures_told(self, talk: Conversation, on_stall: OnStall) -> Steps[None]:
        """Raise what went wrong for good; a preempted program only logs it."""
        failure = self._taken_failure()
        yield from talk.settle(None if on_stall == "leave" else failure, PHASE)

    def _verdict(self, left_s: float) -> bytes:
        """Say how long the copies take against the time left; return what to do."""
        lag, needed_s = self._uploader.lag, self._uploader.estimate_s()
        if not lag:
            return b"leave"
        if left_s == float("inf"):
            return b"finish"
        needs = "an unknown time" if needed_s is None else f"about {needed_s:.0f} s"
        usable_s = max(0.0, left_s - _margin_s(left_s))
        if needed_s is not None and needed_s > usable_s:
            log.warning(
                "%d checkpoints are on their way to further tiers, which takes %s, and "
                "%.0f s are left: leaving them to mpickpt flush",
                lag,
                needs,
                left_s,
            )
            return b"leave"
        log.warning(
            "%d checkpoints are on their way to further tiers, which takes %s; %.0f s "
            "are left: finishing them",
            lag,
            needs,
            left_s,
        )
        return f"{usable_s:.3f}".encode()

    def _waited(
        self,
        talk: Conversation,
        lag: int,
        timeout_s: float | None,
        on_stall: OnStall,
    ) -> Steps[None]:
        def wait(cancelled: threading.Event) -> None:
            if talk.rank == 0 or lag == 0:
                self._wait(cancelled, lag, timeout_s, on_stall)

        yield from talk.work(wait, PHASE)

    def _wait(
        self,
        cancelled: threading.Event,
        lag: int,
        timeout_s: float | None,
        on_stall: OnStall,
    ) -> None:
        begin_s = moved_s = time.monotonic()
        moved = self._uploader.nbytes_gained()
        while not cancelled.is_set() and not self._uploader.wait(_LOOK_S, lag=lag):
            now_s = time.monotonic()
            if (now := self._uploader.nbytes_gained()) != moved:
                moved, moved_s = now, now_s
            if timeout_s is not None and now_s - begin_s >= timeout_s:
                return
            if on_stall == "wait" or now_s - moved_s < STALL_S:
                continue
            # Without a refusal of its own a rank waits for the shards of others.
            refusal = self._refusal()
            if lag or refusal is not None:
                self._stalled_at = self._uploader.n_done
                self._tell_stall(lag)
                if on_stall == "raise" and refusal is not None:
                    raise self._taken_failure() or refusal
                return

    def _refusal(self) -> CheckpointError | None:
        """Return why the last try of a copy failed that is to be tried again."""
        states = self._uploader.states()
        waiting = (state.error for state in states if state.phase == "waiting")
        return next((error for error in waiting if error is not None), None)

    def _tell_stall(self, lag: int) -> None:
        log.warning(
            "%d checkpoints are on their way to further tiers, and none went on for "
            "%.0f s: %s",
            self._uploader.lag,
            STALL_S,
            "saving goes on" if lag else "mpickpt flush goes on with them",
        )

    def _lags(self) -> bool:
        if self._uploader.lag <= self._max_lag:
            return False
        # Who has waited for a minute in vain waits again when a copy has come.
        return self._stalled_at != self._uploader.n_done

    def _tell_failures(self) -> None:
        for state in self._uploader.errors():
            if state.error is not None:
                self._failures.append(state.error)
                log.warning("step %d was not copied: %s", state.step, state.error)

    def _taken_failure(self) -> CheckpointError | None:
        self._tell_failures()
        failures, self._failures = self._failures, []
        return failures[0] if failures else None

    def _published(self, target: UploadTarget, manifest: ShardManifest) -> None:
        number = self._targets.index(target)
        self._good[number].add(manifest.step)
        log.info("step %d has come to %s", manifest.step, target.run)
        keep = self._rules[number]
        if keep is not None:
            remove_surplus(target.run, keep, self._good[number])


def _margin_s(left_s: float) -> float:
    """Return what to keep of the wall time for ending the program."""
    return min(30.0, 0.2 * left_s)


def _place(tier: DirectoryTier | ObjectTier) -> Place:
    if isinstance(tier, ObjectTier):
        return absolute(tier.url)
    return own_directory(tier.path)
