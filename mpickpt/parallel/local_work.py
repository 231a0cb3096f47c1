"""Local file I/O in a thread of its own, so that its rank can go on answering."""

import errno
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from mpickpt.errors import StorageError

T = TypeVar("T")

BUSY, DONE, FAILED = 0, 1, 2

# An abandoned thread is left behind after this long: it may sit in a system call
# that never returns, and a daemon thread does not keep the process.
LEAVE_BEHIND_S = 5.0

# To look how far it has come takes system calls.
LOOK_EVERY_S = 0.5


class LocalWork(Generic[T]):
    """Run one call in a thread and keep what it returned or raised.

    Parameters
    ----------
    call : callable of threading.Event
        Must return soon after the event is set. Never calls MPI.
    moved : callable, optional
        Returns a value that changes while the call goes on, such as bytes written.
    timeout_s : float
        Seconds without change after which the call counts as stuck.
    """

    def __init__(
        self,
        call: Callable[[threading.Event], T],
        *,
        moved: Callable[[], object] | None,
        timeout_s: float,
    ) -> None:
        self.cancelled = threading.Event()
        self.failure: BaseException | None = None
        self.value: T | None = None
        self._call = call
        self._moved = moved
        self._timeout_s = timeout_s
        self._cancelled_early = False
        self.ended = threading.Event()
        self._last = (time.monotonic(), None if moved is None else moved())
        self._thread = threading.Thread(
            target=self._run, name="mpickpt-work", daemon=True
        )
        self._thread.start()

    @property
    def finished(self) -> bool:
        """Whether the call has ended, or was found stuck."""
        return self.ended.is_set() or self._is_stuck()

    @property
    def status(self) -> int:
        """BUSY, DONE or FAILED; what a cancelled call raises is no failure."""
        if not self.finished:
            return BUSY
        failed = self.failure is not None and not self._cancelled_early
        return FAILED if failed else DONE

    def cancel(self) -> None:
        """Ask the call to end; return at once."""
        if not self.finished:
            self._cancelled_early = True
        self.cancelled.set()

    def stop(self) -> None:
        """Cancel the call and wait a few seconds for its end."""
        if not self.finished:
            self.cancel()
            self._thread.join(LEAVE_BEHIND_S)

    def _run(self) -> None:
        try:
            self.value = self._call(self.cancelled)
        except BaseException as failure:
            self.failure = failure
        finally:
            self.ended.set()

    def _is_stuck(self) -> bool:
        if self.failure is not None or self._moved is None:
            return self.failure is not None
        now = time.monotonic()
        if now - self._last[0] < min(LOOK_EVERY_S, self._timeout_s / 4):
            return False
        value = self._moved()
        if value != self._last[1]:
            self._last = (now, value)
        if now - self._last[0] <= self._timeout_s:
            return False
        self.failure = StorageError(
            f"the file system did not answer for {self._timeout_s:g} s",
            errno=errno.ETIMEDOUT,
        )
        return True
