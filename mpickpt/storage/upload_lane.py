"""Copies checkpoints to one target, one after the other, in a thread of its own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from mpickpt.errors import CheckpointError, IncompleteCheckpointError
from mpickpt.format.records import ShardManifest
from mpickpt.planning.pace_of_bytes import ByteMeter
from mpickpt.storage.copy_publishing import missing_ranks, publish_copy, ranks_text
from mpickpt.storage.copy_sweep import sweep_copies
from mpickpt.storage.copy_target import CopyControl
from mpickpt.storage.copying import copy_shards
from mpickpt.storage.staging import yield_cpu
from mpickpt.storage.upload import Upload, UploadRules, UploadState, UploadTarget

log = logging.getLogger(__name__)

OnPublished = Callable[[UploadTarget, ShardManifest], None]

_REMEMBERED = 16


class UploadLane:
    """The copies to one target, in the order in which they were asked for.

    Parameters
    ----------
    target : UploadTarget
        Where to.
    rules : UploadRules
        How patient it is.
    on_published : callable or None
        As of `Uploader`.
    changed : Condition
        Guards what is public here; told of every change.
    cancelled : Event
        Ends the thread soon after it was set; whoever sets it tells `changed`.

    Attributes
    ----------
    uploads : list of Upload
        Those that have not ended.
    ended : deque of UploadState
        The last ones that have.
    failed : list of UploadState
        All that have ended badly, until someone takes them.
    """

    def __init__(
        self,
        target: UploadTarget,
        rules: UploadRules,
        on_published: OnPublished | None,
        changed: threading.Condition,
        cancelled: threading.Event,
    ) -> None:
        self.uploads: list[Upload] = []
        self.ended: deque[UploadState] = deque(maxlen=_REMEMBERED)
        self.failed: list[UploadState] = []
        self._target = target
        self._rules = rules
        self._on_published = on_published
        self._changed = changed
        self._cancelled = cancelled
        self._meter = ByteMeter()
        self._has_swept = False
        self._nbytes_ended = 0
        self.n_done = 0
        self._thread = threading.Thread(
            target=self._run, name="mpickpt-uploader", daemon=True
        )
        self._thread.start()

    def estimate_s(self) -> float | None:
        """Return how long the rest is going to take; None where nothing tells."""
        left = sum(max(0, one.nbytes - one.nbytes_done) for one in self.uploads)
        if not left:
            return 0.0
        least_s = self._target.pace.seconds_for(left)
        rate = self._meter.bytes_per_s()
        return max(least_s, left / rate) if rate else least_s or None

    def nbytes_gained(self) -> int:
        """Return the bytes that have come to the target, each counted once."""
        return self._nbytes_ended + sum(one.most_nbytes_done for one in self.uploads)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, after it was cancelled."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        yield_cpu()
        while (upload := self._next()) is not None:
            try:
                self._advance(upload)
            except CheckpointError as error:
                self._failed_try(upload, error)
            except BaseException as error:
                # The thread lives on, for other copies.
                self._end(upload, _wrapped(error, f"copying to {upload.place}"))

    def _next(self) -> Upload | None:
        """Wait for the first copy that is due; None when it is time to end."""
        with self._changed:
            while not self._cancelled.is_set():
                now_s = time.monotonic()
                for upload in self.uploads:
                    if upload.due_s <= now_s:
                        return upload
                pauses = [upload.due_s - now_s for upload in self.uploads]
                self._changed.wait(min(pauses, default=None))
            return None

    def _advance(self, upload: Upload) -> None:
        if upload.phase != "publishing":
            self._copy(upload)
        if not upload.publishes:
            self._end(upload)
            return
        missing = missing_ranks(upload.place, upload.manifest)
        if not set(missing).isdisjoint(upload.ranks):
            raise CheckpointError(f"{upload.place}: what was copied is gone again")
        if missing:
            self._wait_for_others(upload, missing)
            return
        try:
            kind = self._target.kind
            is_new = publish_copy(upload.place, upload.manifest, kind=kind)
        except IncompleteCheckpointError as error:  # of the target, unlike others
            raise CheckpointError(str(error)) from error
        self._end(upload, self._after_publishing(upload) if is_new else None)

    def _copy(self, upload: Upload) -> None:
        upload.begin_try()
        pace = self._target.pace
        control = CopyControl(
            pace=pace, cancelled=self._cancelled, progress=upload.moved
        )
        with self._meter.running(pace):
            copy_shards(
                upload.manifest,
                upload.source,
                upload.place,
                upload.ranks,
                control=control,
                jobs=self._rules.jobs,
            )
        upload.error = None
        upload.phase = "publishing"

    def _wait_for_others(self, upload: Upload, missing: Sequence[int]) -> None:
        """Look again later, unless none has come for too long."""
        now_s, place = time.monotonic(), upload.place
        waited_s = upload.waits_for(missing, now_s)
        if waited_s > self._rules.others_s:
            raise IncompleteCheckpointError(
                f"{place} is not published: the shards of {ranks_text(missing)} did "
                f"not come within {waited_s:.0f} s; `mpickpt flush` on their nodes "
                "copies them",
                path=str(place),
            )
        upload.due_s = now_s + self._rules.next_look_s(waited_s)

    def _after_publishing(self, upload: Upload) -> CheckpointError | None:
        """Do what follows the publishing; return what went wrong with it."""
        run = self._target.run
        log.info("step %d is in %s", upload.manifest.step, run)
        if not self._has_swept:
            self._has_swept = True
            sweep_copies(run)
        if self._on_published is None:
            return None
        try:
            self._on_published(self._target, upload.manifest)
        except CheckpointError as error:
            return error
        except Exception as error:
            return _wrapped(error, f"after {upload.place} was published")
        return None

    def _failed_try(self, upload: Upload, error: CheckpointError) -> None:
        upload.phase = "waiting"
        if self._cancelled.is_set():
            return
        if not upload.may_succeed_later(error):
            self._end(upload, error)
            return
        # At the 1st, 2nd, 4th, 8th failure: one that stays does not fill the log.
        number = upload.n_tries
        level = logging.INFO if number & (number - 1) else logging.WARNING
        log.log(level, "try %d failed, again later: %s", number, error)
        upload.error = error
        upload.due_s = time.monotonic() + self._rules.pause_s(number)

    def _end(self, upload: Upload, error: CheckpointError | None = None) -> None:
        upload.end(error)
        state = upload.state()
        if error is not None:
            log.error("step %d was not copied: %s", state.step, error)
        with self._changed:
            self.uploads.remove(upload)
            self._nbytes_ended += upload.most_nbytes_done
            self.n_done += error is None
            self.ended.append(state)
            if error is not None:
                self.failed.append(state)
            self._changed.notify_all()


def _wrapped(error: BaseException, what: str) -> CheckpointError:
    failure = CheckpointError(f"{what}: {error!r}")
    failure.__cause__ = error
    return failure
