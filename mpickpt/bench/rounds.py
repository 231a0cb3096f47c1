"""Lets ways of doing the same take turns, and compares how long they took."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpickpt.bench.ranks import Ranks

Way = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timings:
    """The seconds of every way in every round, those of the slowest rank.

    Parameters
    ----------
    seconds : dict of str to list of float
        One number for each round, by the name of the way.
    """

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Return the median seconds of a way."""
        return statistics.median(self.seconds[name])

    def fastest(self, prefix: str) -> str:
        """Return the fastest way whose name begins so."""
        names = (name for name in self.seconds if name.startswith(prefix))
        return min(names, key=self.median)

    def slowest(self, *names: str) -> str:
        """Return the slowest of these ways."""
        return max(names, key=self.median)

    def ratio(self, over: str, under: str) -> float:
        """Return the median of the ratios that two ways had within each round."""
        pairs = zip(self.seconds[over], self.seconds[under], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def rate_text(self, name: str, nbytes: int) -> str:
        """Return name and rate of a way that moved so many bytes."""
        return f"{name} {nbytes / self.median(name) / 1e9:.2f} GB/s"

    def millis_text(self, name: str) -> str:
        """Return name and time of a way."""
        return f"{name} {self.median(name) * 1e3:.1f} ms"


def take_turns(
    ranks: Ranks,
    ways: Mapping[str, Way],
    *,
    repeat: int,
    before: Callable[[], object],
) -> Timings:
    """Time each way `repeat` times, in another order in each round.

    Parameters
    ----------
    ranks : Ranks
        All of them call each way at once.
    ways : mapping of str to callable
        The same names on every rank.
    repeat : int
        Number of rounds that are timed; one that is not goes before them.
    before : callable
        Called before each way, outside its time.
    """
    timings = Timings({name: [] for name in ways})
    for number in range(repeat + 1):
        for name in shuffled([*ways], number):
            before()
            seconds = ranks.timed(ways[name])
            if number:
                timings.seconds[name].append(seconds)
    return timings


def shuffled(names: Sequence[str], seed: int) -> list[str]:
    """Return the names in an order that is the same on every rank."""
    return random.Random(seed).sample(names, len(names))
