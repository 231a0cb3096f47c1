"""Ranks with local work tell each other that it goes on."""

import time
from collections.abc import Callable
from typing import Any

from mpickpt.parallel.local_work import BUSY, FAILED, LocalWork
from mpickpt.parallel.roll_call import Patience
from mpickpt.parallel.waiting import Steps

SHORTEST_NAP_S = 1e-3
LONGEST_NAP_S = 20e-3
# The end of long work is noticed this much later, for which naps cost it little.
NAP_PER_WORK = 0.005


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
        nap_s = NAP_PER_WORK * local.seconds
        yield min(max(nap_s, SHORTEST_NAP_S), LONGEST_NAP_S)
