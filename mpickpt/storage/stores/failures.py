"""Tries again what may pass by itself, and names what does not; touches nothing."""

import errno
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from mpickpt.errors import CheckpointError, StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_CREDENTIALS = "check the credentials and what they may do there"

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_SLICE_S = 0.25


class Cancellation:
    """Ends an upload: because it was asked for, or because a part of it failed.

    Parameters
    ----------
    asked : Event or None
        Set by whoever wants the upload to end.
    """

    def __init__(self, asked: Event | None = None) -> None:
        self._asked = asked or Event()
        self._stopped = Event()

    def is_set(self) -> bool:
        """Tell whether it is to end."""
        return self._asked.is_set() or self._stopped.is_set()

    def wait(self, seconds: float) -> None:
        """Wait, but no longer than until it is to end."""
        end = time.monotonic() + seconds
        while not self.is_set() and (left_s := end - time.monotonic()) > 0:
            self._asked.wait(min(left_s, _SLICE_S))

    def stop(self) -> None:
        """End all that goes on."""
        self._stopped.set()

    def restart(self) -> None:
        """Let what comes begin again."""
        self._stopped.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What an error of a client library means.

    Attributes
    ----------
    errno : int
        As in `Store`.
    reason : str
        What the store or the library says.
    advice : str
        What a person can do about it; empty where nothing is known.
    is_transient : bool
        Whether it may pass by itself.
    """

    errno: int
    reason: str
    advice: str = ""
    is_transient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Calls a client library until it answers, or long enough.

    Attributes
    ----------
    explain : callable
        Says what an error of the library means.
    for_s : float
        How long after the first failure a call is made again.
    """

    explain: Callable[[Exception], Failure]
    for_s: float

    def run(
        self,
        action: str,
        place: str,
        call: Callable[[], T],
        *,
        cancelled: Cancellation | None = None,
        so_far: Callable[[], int] = lambda: 0,
    ) -> T:
        """Return what `call` returns.

        Parameters
        ----------
        action : str
            What it does, as in "cannot {action} {place}".
        place : str
            URL that it is done to.
        call : callable
            Does it, or raises.
        cancelled : Cancellation, optional
            Ends pauses, and trying.
        so_far : callable, optional
            Says how much of it is done; while that grows, it is tried on and on.

        Raises
        ------
        StorageError
            It does not pass, or not in time.
        """
        n_failed, done, deadline = 0, so_far(), 0.0
        while True:
            raise_if_cancelled(action, place, cancelled)
            try:
                return call()
            except CheckpointError:
                raise
            except Exception as error:
                raise_if_cancelled(action, place, cancelled)
                failure = self.explain(error)
                n_failed = 1 if so_far() > done else n_failed + 1
                done, now = so_far(), time.monotonic()
                if n_failed == 1:
                    # Not from the beginning: a part may take long by a slow link.
                    deadline = now + self.for_s
                pause_s = _pause_s(n_failed)
                if not failure.is_transient or now + pause_s > deadline:
                    raise _refusal(action, place, failure, n_failed) from error
            log.info("%s %s: %s; again in %.1f s", action, place, failure, pause_s)
            (cancelled or Cancellation()).wait(pause_s)


def raise_if_cancelled(action: str, place: str, cancelled: Cancellation | None) -> None:
    """Raise a StorageError (ECANCELED) if that was asked for."""
    if cancelled is not None and cancelled.is_set():
        message = f"cannot {action} {place}: cancelled"
        raise StorageError(message, errno=errno.ECANCELED, path=place)


def _refusal(action: str, place: str, failure: Failure, n_tries: int) -> StorageError:
    tries = f" ({n_tries} tries)" if n_tries > 1 else ""
    advice = f"; {failure.advice}" if failure.advice else ""
    message = f"cannot {action} {place}: {failure.reason}{tries}{advice}"
    return StorageError(message, errno=failure.errno, path=place)


def _pause_s(n_failed: int) -> float:
    # Many ranks fail at once when a store is busy: they must not come back at once.
    longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(n_failed - 1, 10))
    return longest * random.uniform(0.5, 1.0)
