"""Steps: collective work that is written once and driven in two ways; no MPI here.

A collective that waits is a generator that yields between two tests. `run` drives
it to its end and sleeps in between; an asynchronous save drives the same generator
a step at a time from `poll()`.
"""

import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Nap:
    """A wait for this rank's own work, of which nobody else tells.

    Attributes
    ----------
    ended : threading.Event
        Set when the work ends, and the nap with it.
    longest_s : float
        Ends the nap in any case.
    """

    ended: threading.Event
    longest_s: float


# What a step yields is how to wait for the next step: 0.0 begins the back-off anew,
# None goes on with it.
Pause: TypeAlias = float | Nap | None
Steps: TypeAlias = Generator[Pause, None, T]

DEFAULT_TIMEOUT_S = 600.0  # how to choose another one: SaveOptions
EAGER_TESTS = 40
FIRST_SLEEP_S = 10e-6
LONGEST_SLEEP_S = 20e-3
SLEEP_GROWTH = 1.05
LONGEST_GAP_S = 1.0


class Pace:
    """Decide how long to sleep between two tests.

    A few tests come without sleep, because most answers arrive within microseconds
    and the shortest sleep of Linux costs 60 of them; then sleeps grow, so that 64
    ranks on 2 cores leave both to the rank that all wait for.
    """

    __slots__ = ("_eager", "_sleep_s")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin again with the tests that come without sleep."""
        self._eager = EAGER_TESTS
        self._sleep_s = FIRST_SLEEP_S

    def sleep(self) -> None:
        """Yield the core, or sleep."""
        if self._eager > 0:
            self._eager -= 1
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(self._sleep_s * SLEEP_GROWTH, LONGEST_SLEEP_S)


class Deadline:
    """Count the seconds without progress.

    A gap between two checks counts at most one second: neither a suspended job nor
    a program that polls rarely is the other ranks' fault.
    """

    __slots__ = ("_checked", "_timeout_s", "_waited_s")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waited_s = 0.0
        self._checked = time.monotonic()

    def progressed(self) -> None:
        """Count from now on."""
        self._waited_s = 0.0
        self._checked = time.monotonic()

    def has_passed(self) -> bool:
        """Whether nothing has moved for `timeout_s`."""
        now = time.monotonic()
        self._waited_s += min(now - self._checked, LONGEST_GAP_S)
        self._checked = now
        return self._waited_s > self._timeout_s

    def check(self) -> None:
        """Raise TimeoutError if the deadline has passed."""
        if self.has_passed():
            raise TimeoutError(f"no progress for {self._timeout_s:g} s")


def run(steps: Steps[T]) -> T:
    """Drive the steps to their end and return their result.

    Notes
    -----
    Collective if the steps are. An exception that arrives during a sleep (Ctrl-C)
    is thrown into the steps, so that they can tell the other ranks.
    """
    pace = Pace()
    try:
        while True:
            pause = next(steps)
            try:
                _wait(pace, pause)
            except BaseException as interruption:
                steps.throw(interruption)
                raise
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def beside(steps: Steps[T], move: Callable[[], bool]) -> Steps[T]:
    """Go on with steps, and between them move whatever is ready to be moved.

    Parameters
    ----------
    steps : generator
        As for `run`.
    move : callable
        Moves messages of its own; tells whether there were any.
    """
    try:
        while True:
            pause = next(steps)
            moved = move()
            # A nap until this rank's own work ends would keep the others waiting.
            yield 0.0 if moved else None if isinstance(pause, Nap) else pause
    except StopIteration as end:
        result: T = end.value
        return result


def _wait(pace: Pace, pause: Pause) -> None:
    if isinstance(pause, Nap):
        pause.ended.wait(pause.longest_s)
        return
    if pause is not None:
        pace.restart()
    pace.sleep()


def resolve_timeout_s(timeout_s: float | None) -> float:
    """Return the argument, else ``MPICKPT_TIMEOUT_S``, else 600 seconds."""
    if timeout_s is None:
        text = os.environ.get("MPICKPT_TIMEOUT_S", "")
        timeout_s = _seconds(text) if text else DEFAULT_TIMEOUT_S
    if not isinstance(timeout_s, int | float):
        raise TypeError(f"timeout_s is {timeout_s!r}; expected seconds")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0 seconds, got {timeout_s!r}")
    return float(timeout_s)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"MPICKPT_TIMEOUT_S: expected seconds, got {text!r}") from None
