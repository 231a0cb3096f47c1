"""Ranks with local work tell each other that it goes on."""

import time
from collections.abc import Callable
from typing import Any

from mpickpt.parallel.local_work import BUSY, FAILED, LocalWork
from mpickpt.parallel.roll_call import Patience
from mpickpt.parallel.waiting import Nap, Steps

LONGEST_NAP_S = 0.1  # deadlines and Ctrl-C are looked at as often


def beat(
    local: LocalWork[Any],
    beat_s: float,
    patience_of: Callable[[], Patience],
    tell: Callable[[bytes], Steps[list[bytes]]],
) -> Steps[list[int]]:
    """Exchange statuses until no rank is busy; return the ranks that failed.

    Parameters
    ----------
    local : LocalWork
        This rank's work; cancelled when another rank's has failed.
    beat_s : float
        Longest time that a busy rank lets the others wait for its status.
    patience_of : callable
        Returns a new `Patience`.
    tell : callable of bytes
        An allgather of one byte.

    Notes
    -----
    A rank that is done tells at once and waits for the busy ones, so when the last
    one ends, all know it one allgather later, whatever `beat_s` is.
    """
    while True:
        yield from _wait(local, beat_s, patience_of())
        statuses = yield from tell(bytes([local.status]))
        failing = [rank for rank, status in enumerate(statuses) if status[0] == FAILED]
        if failing:
            local.cancel()
        if all(status[0] != BUSY for status in statuses):
            return failing


def _wait(local: LocalWork[Any], beat_s: float, patience: Patience) -> Steps[None]:
    end = time.monotonic() + beat_s
    while not local.finished and time.monotonic() < end:
        patience.check()
        # The others wait for this rank, not this rank for them.
        patience.progressed()
        yield Nap(local.ended, min(LONGEST_NAP_S, max(end - time.monotonic(), 0.0)))
