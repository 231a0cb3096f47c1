"""Copies checkpoints to other places in the background; one process, no MPI."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mpickpt.format.records import ShardManifest
from mpickpt.storage.upload import Upload, UploadRules, UploadState, UploadTarget
from mpickpt.storage.upload_lane import OnPublished, UploadLane

__all__ = ["UploadRules", "UploadState", "UploadTarget", "Uploader"]

_JOIN_S = 5.0


class Uploader:
    """Copies published checkpoints to targets while the program goes on.

    Parameters
    ----------
    targets : sequence of UploadTarget
        Where checkpoints go if `submit` does not say.
    rules : UploadRules, optional
        How patient it is.
    on_published : callable, optional
        Called on the copying thread when this process has published a copy, with its
        target and manifest. What it raises becomes the error of that copy.

    Notes
    -----
    Local: each rank has its own, which copies the shards that lie with it. Each target
    has one daemon thread, so that a slow one does not hold up the others; they yield
    to the program's own (``MPICKPT_NICE``). What a target refuses is tried again as
    long as the program runs; a damaged source is not. All methods may be called from
    any thread.
    """

    def __init__(
        self,
        targets: Sequence[UploadTarget],
        *,
        rules: UploadRules | None = None,
        on_published: OnPublished | None = None,
    ) -> None:
        self.targets = tuple(targets)
        self._rules = rules or UploadRules()
        self._on_published = on_published
        self._lanes: dict[UploadTarget, UploadLane] = {}
        self._changed = threading.Condition()
        self._cancelled = threading.Event()
        self._is_closed = False

    def submit(
        self,
        manifest: ShardManifest,
        source: Path,
        ranks: Sequence[int],
        *,
        publishes: bool,
        to: Sequence[UploadTarget] | None = None,
    ) -> None:
        """Have a checkpoint copied; returns at once.

        Parameters
        ----------
        manifest : ShardManifest
            Of a published checkpoint.
        source : Path
            Its directory.
        ranks : sequence of int
            Whose shards this process copies.
        publishes : bool
            Whether this process publishes the copy when those of all ranks are there.
        to : sequence of UploadTarget, optional
            Where to; by default to all targets.
        """
        with self._changed:
            if self._is_closed:
                raise ValueError("the uploader was closed")
            for target in self.targets if to is None else to:
                upload = Upload(manifest, source, ranks, target, publishes=publishes)
                self._lane(target).uploads.append(upload)
            self._changed.notify_all()

    @property
    def lag(self) -> int:
        """Number of checkpoints that were submitted and are not where they should be.

        Those that have failed for good do not count.
        """
        return len(self.holds())

    def holds(self) -> set[int]:
        """Return the steps that are still needed where they lie."""
        with self._changed:
            return {upload.manifest.step for upload in self._uploads()}

    def states(self) -> list[UploadState]:
        """Return the last copies that have ended, then those that have not."""
        with self._changed:
            ended = [state for lane in self._lanes.values() for state in lane.ended]
            return [*ended, *(upload.state() for upload in self._uploads())]

    def errors(self) -> list[UploadState]:
        """Return the copies that have failed since this was called last.

        Notes
        -----
        What is tried again is not among them; see `states`.
        """
        failed: list[UploadState] = []
        with self._changed:
            for lane in self._lanes.values():
                failed += lane.failed
                lane.failed.clear()
        return failed

    def estimate_s(self) -> float | None:
        """Return how long the rest is going to take; None where nothing tells.

        Notes
        -----
        By the speed measured so far. Waiting for other ranks is not in it.
        """
        with self._changed:
            times = [lane.estimate_s() for lane in self._lanes.values()]
        known = [seconds for seconds in times if seconds is not None]
        return max(known, default=0.0) if len(known) == len(times) else None

    @property
    def n_done(self) -> int:
        """Number of copies that have ended well."""
        with self._changed:
            return sum(lane.n_done for lane in self._lanes.values())

    def nbytes_gained(self) -> int:
        """Return the bytes that have come to targets; grows while copies go on.

        Notes
        -----
        What a try moves again after a failure does not count.
        """
        with self._changed:
            return sum(lane.nbytes_gained() for lane in self._lanes.values())

    def wait(self, timeout_s: float | None = None, *, lag: int = 0) -> bool:
        """Wait until at most so many checkpoints are under way; tell whether it is so.

        Parameters
        ----------
        timeout_s : float, optional
            How long at most.
        lag : int
            As many as may be left; 0 waits for all.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._lag() <= lag, timeout_s)

    def close(
        self, *, drain: bool, deadline_s: float | None = None
    ) -> list[UploadState]:
        """End, and return the copies that have not come to their end.

        Parameters
        ----------
        drain : bool
            Whether to go on with them before.
        deadline_s : float, optional
            For how many seconds. Without it as long as they go on at all: until nothing
            was copied for `UploadRules.others_s`.

        Notes
        -----
        `mpickpt flush` goes on with what is left.
        """
        with self._changed:
            self._is_closed = True
        if drain:
            self._drain(deadline_s)
        self._cancelled.set()
        with self._changed:
            self._changed.notify_all()
        for lane in self._lanes.values():
            lane.join(_JOIN_S)
        with self._changed:
            return [upload.state() for upload in self._uploads()]

    def _lane(self, target: UploadTarget) -> UploadLane:
        if target not in self._lanes:
            self._lanes[target] = UploadLane(
                target,
                self._rules,
                self._on_published,
                self._changed,
                self._cancelled,
            )
        return self._lanes[target]

    def _uploads(self) -> list[Upload]:
        return [upload for lane in self._lanes.values() for upload in lane.uploads]

    def _lag(self) -> int:
        return len({upload.manifest.step for upload in self._uploads()})

    def _drain(self, deadline_s: float | None) -> None:
        if deadline_s is not None:
            self.wait(deadline_s)
            return
        seen, seen_at_s = self.nbytes_gained(), time.monotonic()
        while not self.wait(min(1.0, self._rules.others_s)):
            now_s = time.monotonic()
            if (moved := self.nbytes_gained()) != seen:
                seen, seen_at_s = moved, now_s
            elif now_s - seen_at_s > self._rules.others_s:
                return
