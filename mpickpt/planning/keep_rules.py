"""Defines the rules that say which checkpoints of a run stay; pure."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Reasons = Mapping[int, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One published checkpoint, as the rules see it.

    Attributes
    ----------
    step : int
        Its step; order is by step alone.
    is_pinned : bool
        Whether somebody asked that it stays.
    is_good : bool
        Whether it is known to load: agreed by this run, or loaded or verified, and
        all sizes are still right.
    metrics : mapping of str
        What it is measured by.
    nbytes : int
        What its removal gives back.
    """

    step: int
    is_pinned: bool = False
    is_good: bool = True
    metrics: Mapping[str, Any] = field(default_factory=dict)
    nbytes: int = 0


class KeepPolicy(ABC):
    """A rule that says which checkpoints stay; `a | b` keeps what either keeps."""

    __slots__ = ()

    @abstractmethod
    def reasons(self, candidates: Sequence[Candidate]) -> Reasons:
        """Return the steps to keep, each with the reasons why.

        Parameters
        ----------
        candidates : sequence of Candidate
            In order of step.
        """

    def __or__(self, other: "KeepPolicy | int") -> "KeepAny":
        return KeepAny((*_alternatives(self), *_alternatives(parse_keep(other))))

    def __ror__(self, other: int) -> "KeepAny":
        return parse_keep(other) | self


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """Keep the checkpoints of the highest steps.

    Parameters
    ----------
    n : int
        How many, at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        _require_count(self, self.n)

    def reasons(self, candidates: Sequence[Candidate]) -> Reasons:
        """Return the steps to keep, each with the reasons why."""
        reason = f"among the last {self.n}" if self.n > 1 else "the last"
        return {candidate.step: (reason,) for candidate in candidates[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepEvery(KeepPolicy):
    """Keep the checkpoints of steps that are multiples of a number.

    Parameters
    ----------
    n : int
        The number, at least 1.
    """

    n: int

    def __post_init__(self) -> None:
        _require_count(self, self.n)

    def reasons(self, candidates: Sequence[Candidate]) -> Reasons:
        """Return the steps to keep, each with the reasons why."""
        steps = (candidate.step for candidate in candidates)
        return {step: (f"multiple of {self.n}",) for step in steps if not step % self.n}


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keep the checkpoints that are best by a metric; of equals, the later.

    Parameters
    ----------
    n : int
        How many, at least 1.
    metric : str
        Its name. Checkpoints that do not have it yet, or have no finite number for
        it, are not kept by this rule: join `KeepLast` for those not evaluated yet.
    mode : {"min", "max"}
        Whether low or high is good.
    """

    n: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _require_count(self, self.n)
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode {self.mode!r}: expected "min" or "max"')

    def reasons(self, candidates: Sequence[Candidate]) -> Reasons:
        """Return the steps to keep, each with the reasons why."""
        sign = 1 if self.mode == "min" else -1
        ranking = sorted(
            (sign * value, -candidate.step)
            for candidate in candidates
            if (value := _finite(candidate.metrics.get(self.metric))) is not None
        )
        which = f"best {self.n}" if self.n > 1 else "best"
        reason = f"{which} of {self.metric} ({self.mode})"
        return {-negated: (reason,) for _, negated in ranking[: self.n]}


@dataclass(frozen=True, slots=True)
class KeepAny(KeepPolicy):
    """Keep what any of several rules keeps; what `|` builds.

    Parameters
    ----------
    policies : tuple of KeepPolicy
        The rules.
    """

    policies: tuple[KeepPolicy, ...]

    def reasons(self, candidates: Sequence[Candidate]) -> Reasons:
        """Return the steps to keep, each with the reasons why."""
        found: dict[int, list[str]] = {}
        for policy in self.policies:
            for step, reasons in policy.reasons(candidates).items():
                found.setdefault(step, []).extend(reasons)
        return found


def parse_keep(value: KeepPolicy | int) -> KeepPolicy:
    """Return the rule for what a user passes as `keep`; an int means `KeepLast`.

    Raises
    ------
    TypeError
        If it is neither.
    ValueError
        If it is an int below 1.
    """
    if isinstance(value, KeepPolicy):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return KeepLast(value)
    raise TypeError(
        f"keep={value!r}: expected a number of checkpoints, or KeepLast, KeepEvery, "
        "KeepBest joined by |"
    )


def _alternatives(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _require_count(rule: KeepPolicy, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"{type(rule).__name__}({n!r}): expected an int from 1")
