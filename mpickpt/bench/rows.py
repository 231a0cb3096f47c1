"""The rows of the one table that `mpickpt bench` prints; measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = ("measured", ">value", "target", "verdict", "how")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a measured value should reach.

    Parameters
    ----------
    bound : float
        The least value, or the largest.
    is_floor : bool
        Whether larger values are better.
    """

    bound: float
    is_floor: bool

    def is_reached(self, value: float) -> bool:
        """Tell whether a value is on the right side of the bound."""
        return value >= self.bound if self.is_floor else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.is_floor else '<='} {self.bound:g}"


def at_least(bound: float) -> Target:
    """Return the target of values that should be large."""
    return Target(bound=bound, is_floor=True)


def at_most(bound: float) -> Target:
    """Return the target of values that should be small."""
    return Target(bound=bound, is_floor=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value.

    Parameters
    ----------
    group : str
        The group of measurements that it comes from, as `--only` names it.
    subject : str
        What was measured, against what.
    value : float or None
        None where it could not be measured; `how` then says why.
    unit : str
        "x" for ratios.
    target : Target or None
        None for what is reported only.
    how : str
        The figures behind the value, for people.
    seconds : mapping of str to sequence of float
        Every timing behind it, by the name of the way.
    """

    group: str
    subject: str
    value: float | None
    unit: str = "x"
    target: Target | None = None
    how: str = ""
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """One of "reached", "missed", "reported" and "not run"."""
        if self.value is None:
            return "not run"
        if self.target is None:
            return "reported"
        return "reached" if self.target.is_reached(self.value) else "missed"

    def cells(self) -> list[str]:
        """Return the texts of the table's columns."""
        value = "-" if self.value is None else f"{self.value:.2f} {self.unit}"
        target = "-" if self.target is None else str(self.target)
        return [self.subject, value, target, self.verdict, self.how]

    def document(self) -> dict[str, Any]:
        """Return the row as JSON."""
        target = self.target
        return {
            "group": self.group,
            "subject": self.subject,
            "value": self.value,
            "unit": self.unit,
            "target": None if target is None else target.bound,
            "target_is": None if target is None else str(target),
            "verdict": self.verdict,
            "how": self.how,
            "seconds": {name: list(times) for name, times in self.seconds.items()},
        }


def not_run(group: str, subject: str, why: str, target: Target | None = None) -> Row:
    """Return the row of what was not measured, which says why."""
    return Row(group=group, subject=subject, value=None, target=target, how=why)
