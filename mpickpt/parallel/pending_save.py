"""A save in the background: driven by polls or by a thread, or given up."""

import atexit
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from mpickpt.parallel.communicators import Conversations
from mpickpt.parallel.options import SaveResult
from mpickpt.parallel.waiting import Steps, run
from mpickpt.storage.staging import yield_cpu

POLL_S = 1e-3


class PendingSave:
    """A save whose state was copied; the rest goes on in the background.

    Attributes
    ----------
    step : int
        The step that is saved.
    path : Path
        Directory of the checkpoint.
    owner : object
        Who asks for the result; None for a save of `save_sharded_async`.

    Notes
    -----
    A thread writes the shard by itself. Agreeing and publishing take messages: with
    ``progress="poll"`` they go on whenever `poll` is called, and are over within six
    polls of every rank after the slowest rank has written, and on the disks of nodes
    with copies after one for each 16 MiB more; `result` waits for all.
    """

    def __init__(
        self,
        step: int,
        path: Path,
        steps: Steps[SaveResult],
        owner: object = None,
        *,
        threaded: bool,
    ) -> None:
        self.step = step
        self.path = path
        self.owner = owner
        self._steps = steps
        self._result: SaveResult | None = None
        self._failure: BaseException | None = None
        self._is_settled = False
        self._abandoned = threading.Event()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(
                target=self._drive, name="mpickpt-pending", daemon=True
            )
            _driven_by_threads().add(self)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not; local, and asks nobody."""
        return self._result is not None or self._failure is not None

    @property
    def has_failed(self) -> bool:
        """Whether the save has ended badly, as far as this rank knows; local."""
        return self._failure is not None

    @property
    def outcome(self) -> str | None:
        """What its time-out says of whether it was published; None without one."""
        return getattr(self._failure, "outcome", None)

    def poll(self) -> bool:
        """Let the save go on for up to a millisecond; tell whether it has ended.

        Notes
        -----
        Never raises what went wrong: ranks may learn of it at different polls, and
        `result` raises it on all of them. Local.
        """
        if self.done or self._thread is not None:
            return self.done
        end = time.monotonic() + POLL_S
        while not self.done and time.monotonic() < end:
            if not self._go_on():
                break
        return self.done

    def result(self) -> SaveResult:
        """Wait until the save has ended; return its result or raise its error.

        Notes
        -----
        Collective: every rank calls it, and all raise the same. Durable and whole on
        every rank when it returns.
        """
        self.finish()
        self._is_settled = True
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result

    def settle(self) -> None:
        """Wait for the end; raise what went wrong, unless that was raised before."""
        if self._is_settled:
            self.finish()
        else:
            self.result()

    def finish(self) -> None:
        """Wait for the end, whatever it is; collective."""
        if self._thread is not None:
            while self._thread.is_alive():  # so that Ctrl-C gets through
                self._thread.join(0.1)
        elif not self.done:
            self._drive()
        if isinstance(self._failure, KeyboardInterrupt | SystemExit):
            raise self._failure

    def abandon(self) -> None:
        """End the save here, unpublished unless rank 0 is publishing it just now.

        Notes
        -----
        Local. The writing is broken off and what this rank wrote is removed. The
        other ranks are told; among several ranks the communicator is given up.
        """
        self._is_settled = True
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join()
        elif not self.done:
            self._drive()

    def _drive(self) -> None:
        if self._thread is not None:
            yield_cpu()
        try:
            self._result = run(self._steps_until_abandoned())
        except BaseException as failure:
            self._failure = failure
        finally:
            _driven_by_threads().discard(self)

    def _steps_until_abandoned(self) -> Steps[SaveResult]:
        while not self._abandoned.is_set():
            try:
                pause = next(self._steps)
            except StopIteration as end:
                result: SaveResult = end.value
                return result
            try:
                yield pause
            except BaseException as interruption:
                self._steps.throw(interruption)
                raise
        # Thrown, not closed: only an interruption is told to the other ranks.
        with suppress(StopIteration):
            self._steps.throw(_Abandoned("the save was abandoned"))
        raise _Abandoned("the save was abandoned")

    def _go_on(self) -> bool:
        """Take one step; tell whether another one may follow at once."""
        try:
            pause = next(self._steps)
        except StopIteration as end:
            self._result = end.value
        except BaseException as failure:
            self._failure = failure
            if not isinstance(failure, Exception):
                raise
        else:
            return pause == 0.0
        return False


class _Abandoned(BaseException):
    """Ends the steps of a save as Ctrl-C would."""


@cache
def _driven_by_threads() -> set[PendingSave]:
    """Return the saves that threads drive just now; the end of the process ends them.

    Notes
    -----
    By one handler for all: Python keeps the place of each that was ever registered.
    """
    saves: set[PendingSave] = set()

    def abandon_all() -> None:
        for save in tuple(saves):
            save.abandon()

    # No thread may talk when MPI is finalised, which is after this.
    atexit.register(abandon_all)
    return saves


def pending_of(talks: Conversations) -> PendingSave | None:
    """Return the last save in the background on a communicator, ended or not."""
    pending: PendingSave | None = talks.memory.get("pending")
    return pending
