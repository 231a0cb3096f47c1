"""Words that all sections of the report share."""

from collections.abc import Iterator
from typing import TypeAlias

from mpickpt.planning.cost import seconds_said
from mpickpt.planning.probed import Timing

# (label, text) of each line.
Lines: TypeAlias = Iterator[tuple[str, str]]

NOT_FOUND = "could not be found out"
PRECISION_S = 0.01


def timing_said(timing: Timing | None) -> str:
    """Return median and worst of some times."""
    if timing is None:
        return NOT_FOUND
    median, worst = time_said(timing.median_s), time_said(timing.worst_s)
    return (
        f"{median} (worst of {timing.count}: {worst})" if timing.count > 1 else median
    )


def time_said(seconds: float) -> str:
    """Return a time as a person says it, also a very short one: "102 µs"."""
    return f"{1e6 * seconds:.3g} µs" if seconds < 1e-3 else seconds_said(seconds)
