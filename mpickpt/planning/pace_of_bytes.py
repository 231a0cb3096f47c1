"""Spreads bytes over time, and tells how fast they go; does no I/O."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Wait = Callable[[float, threading.Event | None], None]

# Who wakes late catches up, but what was not used while idle is not saved up.
_CATCH_UP_S = 0.1
_RUNS_MEASURED = 8


class BytePace:
    """A limit of bandwidth that the threads of a process share.

    Parameters
    ----------
    bytes_per_s : float or None
        The limit; None is none.
    clock : callable, optional
        Seconds that never go back.
    wait : callable, optional
        Waits for some seconds, or until an event is set.

    Attributes
    ----------
    bytes_per_s : float or None
        The limit.
    nbytes : int
        Bytes that went so far.

    Notes
    -----
    Thread-safe. In any period no more bytes begin than the limit allows, but for the
    last piece and a tenth of a second's worth. Who asks first goes first.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Wait | None = None,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={bytes_per_s!r}: expected more than 0")
        self.bytes_per_s = bytes_per_s
        self.nbytes = 0
        self._clock = clock
        self._wait = wait or _wait
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def take(self, nbytes: int, cancelled: threading.Event | None = None) -> None:
        """Wait until these bytes may go.

        Parameters
        ----------
        nbytes : int
            How many are going to be moved now.
        cancelled : threading.Event, optional
            Ends the waiting when it is set.
        """
        with self._lock:
            self.nbytes += nbytes
            if self.bytes_per_s is None:
                return
            now = self._clock()
            begin = max(self._free_at_s, now - _CATCH_UP_S)
            self._free_at_s = begin + nbytes / self.bytes_per_s
        if begin > now:
            self._wait(begin - now, cancelled)

    def seconds_for(self, nbytes: int) -> float:
        """Return the least time that so many bytes take."""
        return 0.0 if self.bytes_per_s is None else nbytes / self.bytes_per_s


class ByteMeter:
    """Measures how fast bytes went in the last few runs, and go in this one.

    Notes
    -----
    One thread begins and ends runs; any thread may ask.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._runs: deque[tuple[int, float]] = deque(maxlen=_RUNS_MEASURED)
        self._current: tuple[BytePace, int, float] | None = None

    @contextmanager
    def running(self, pace: BytePace) -> Iterator[None]:
        """Measure what goes through a pace during the body."""
        self._current = (pace, pace.nbytes, self._clock())
        try:
            yield
        finally:
            self._runs.append(self._so_far())
            self._current = None

    def bytes_per_s(self) -> float | None:
        """Return the speed; None where nothing has gone yet."""
        runs = [*self._runs, self._so_far()]
        nbytes = sum(n for n, _ in runs)
        return nbytes / max(sum(s for _, s in runs), 1e-6) if nbytes else None

    def _so_far(self) -> tuple[int, float]:
        current = self._current
        if current is None:
            return 0, 0.0
        pace, before, begin_s = current
        return pace.nbytes - before, self._clock() - begin_s


def _wait(seconds: float, cancelled: threading.Event | None) -> None:
    if cancelled is None:
        time.sleep(seconds)
    else:
        cancelled.wait(seconds)
