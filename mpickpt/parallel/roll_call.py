"""Patience: deadlines that count from the last progress, and who let them pass.

On a line that works no message of this module is sent. When a deadline passes on
some rank, that rank tells root; root asks all ranks who is there, and its verdict
names those who did not answer. Ranks that wait listen for both twice a second.
"""

import time
from collections.abc import Sequence

from mpickpt.errors import CollectiveTimeoutError
from mpickpt.parallel.line import (
    ROOT,
    TAG_EXPIRED,
    TAG_PRESENT,
    TAG_QUERY,
    TAG_QUIT,
    TAG_VERDICT,
    Line,
)
from mpickpt.parallel.waiting import Deadline, Pace

LISTEN_EVERY_S = 0.5
ROLL_CALL_S = 1.5
VERDICT_S = 3.0
# Root handles four small messages of each rank, one after the other: 10 to 40 µs a
# rank measured, so 2 s more for 10,000 ranks, where they queue, is ample.
PER_RANK_S = 200e-6


class Patience(Deadline):
    """Raise `CollectiveTimeoutError` when nothing has moved for too long.

    Parameters
    ----------
    line : Line
        What is waited on.
    phase : str
        What the error says was waited for.
    timeout_s : float
        Seconds without progress.
    """

    __slots__ = ("_line", "_phase")

    def __init__(self, line: Line, phase: str, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._line = line
        self._phase = phase

    def check(self) -> None:
        """Raise if the deadline has passed here or on another rank.

        Raises
        ------
        CollectiveTimeoutError
            Nothing moved for `timeout_s`, or another rank has given up, or this one
            has in another call on the same communicator.
        """
        passed = self.has_passed()
        if self._line.comm is None:
            return
        self._line.raise_if_given_up(self._phase)
        listen_now_and_then(self._line, self._phase)
        if passed:
            with self._line.translated(self._phase):
                raise _expire(self._line, self._phase, self._timeout_s)


def listen_now_and_then(line: Line, phase: str) -> None:
    """Listen if that is half a second ago: probes cost microseconds."""
    now = time.monotonic()
    if line.comm is not None and now - line.heard_s > LISTEN_EVERY_S:
        line.heard_s = now
        with line.translated(phase):
            listen(line, phase)


def listen(line: Line, phase: str) -> None:
    """Answer root's question; raise if another rank has given up.

    Raises
    ------
    CollectiveTimeoutError
        Another rank let a deadline pass, or was interrupted.
    """
    if line.rank == ROOT:
        quitter = line.take(TAG_QUIT)
        if quitter is not None:
            raise _deliver_verdict(line, phase, [quitter[0]])
        if line.take(TAG_EXPIRED) is not None:
            raise _deliver_verdict(line, phase, _call_roll(line))
        return
    _answer(line)
    verdict = line.take(TAG_VERDICT)
    if verdict is not None:
        raise line.give_up(phase, verdict[1], reason(verdict[1]))


def _expire(line: Line, phase: str, timeout_s: float) -> CollectiveTimeoutError:
    after = f" within {timeout_s:g} s"
    if line.rank == ROOT:
        return _deliver_verdict(line, phase, _call_roll(line), after)
    missing = _ask_root(line)
    return line.give_up(phase, missing, reason(missing, after))


def _deliver_verdict(
    line: Line, phase: str, missing: list[int], after: str = ""
) -> CollectiveTimeoutError:
    line.post_to_all(TAG_VERDICT, missing)
    return line.give_up(phase, missing, reason(missing, after))


def _call_roll(line: Line) -> list[int]:
    line.post_to_all(TAG_QUERY, [])
    positions = {line.rank: line.position}
    end, pace = time.monotonic() + roll_call_s(line.size), Pace()
    while len(positions) < line.size and time.monotonic() < end:
        for tag in (TAG_PRESENT, TAG_EXPIRED):
            while (answer := line.take(tag)) is not None:
                positions[answer[0]] = answer[1][0]
        pace.sleep()
    return _missing(positions, line.size)


def _missing(positions: dict[int, int], size: int) -> list[int]:
    silent = [rank for rank in range(size) if rank not in positions]
    if silent:
        return silent
    latest = max(positions.values())
    return [rank for rank in range(size) if positions[rank] < latest]


def _ask_root(line: Line) -> list[int]:
    line.post(TAG_EXPIRED, ROOT, [line.position])
    end, pace = time.monotonic() + verdict_s(line.size), Pace()
    while time.monotonic() < end:
        _answer(line)
        verdict = line.take(TAG_VERDICT)
        if verdict is not None:
            return verdict[1]
        pace.sleep()
    return [ROOT]


def _answer(line: Line) -> None:
    if line.take(TAG_QUERY) is not None:
        line.post(TAG_PRESENT, ROOT, [line.position])


def roll_call_s(size: int) -> float:
    """Return how long root waits for answers to the question who is there."""
    return ROLL_CALL_S + size * PER_RANK_S


def verdict_s(size: int) -> float:
    """Return how long the others wait for root's verdict: a roll call, and as much."""
    return VERDICT_S + 2 * size * PER_RANK_S


def reason(missing: Sequence[int], after: str = "") -> str:
    """Return the words that name the missing ranks."""
    if not missing:
        return f"the ranks did not agree{after}, though all of them answer"
    if len(missing) == 1:
        return f"rank {missing[0]} did not arrive{after}"
    return f"ranks {', '.join(map(str, missing))} did not arrive{after}"
