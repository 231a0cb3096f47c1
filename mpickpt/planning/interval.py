"""Decides when a save is due; pure functions of how far the run has come."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

# Soon enough to learn what a save costs, late enough that a start is not slowed.
FIRST_SAVE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come when it asks whether a save is due.

    Attributes
    ----------
    step : int
        The step that was just done.
    now_s : float
        The time, on any clock that never goes back.
    last_step : int or None
        The step that was saved or restored last.
    last_time_s : float
        When the training went on after that, or when the run began.
    save_cost_s : float or None
        By how much a save delays the training, measured; None before the first.
    """

    step: int
    now_s: float
    last_step: int | None
    last_time_s: float
    save_cost_s: float | None = None


class Trigger(ABC):
    """A rule that says when a save is due; `a | b` is due when either is."""

    __slots__ = ()

    @abstractmethod
    def is_due(self, progress: Progress) -> bool:
        """Tell whether to save now."""

    def __or__(self, other: "Trigger") -> "AnyOf":
        if not isinstance(other, Trigger):
            return NotImplemented
        return AnyOf((*_alternatives(self), *_alternatives(other)))


@dataclass(frozen=True, slots=True)
class EverySteps(Trigger):
    """Save after each step whose number is a multiple, except step 0.

    Parameters
    ----------
    n : int
        At least 1.
    """

    n: int

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"EverySteps({self.n!r}): expected an int from 1")

    def is_due(self, progress: Progress) -> bool:
        """Tell whether to save now."""
        step = progress.step
        return step > 0 and step % self.n == 0 and step != progress.last_step


@dataclass(frozen=True, slots=True)
class EveryMinutes(Trigger):
    """Save when the training has gone on for some minutes since the last save.

    Parameters
    ----------
    minutes : float
        More than 0.
    """

    minutes: float

    def __post_init__(self) -> None:
        _require_positive(self, self.minutes)

    def is_due(self, progress: Progress) -> bool:
        """Tell whether to save now."""
        return _has_passed(progress, 60 * self.minutes)


@dataclass(frozen=True, slots=True)
class YoungDaly(Trigger):
    """Save as often as loses the least time, given how often the job fails.

    Parameters
    ----------
    mtbf_hours : float
        Mean time between failures of the whole job: that of one node divided by the
        number of nodes.

    Notes
    -----
    The interval follows from the measured cost of a save, see `interval_s`. Before
    that is known the first save is due after a minute.
    """

    mtbf_hours: float

    def __post_init__(self) -> None:
        _require_positive(self, self.mtbf_hours)

    def is_due(self, progress: Progress) -> bool:
        """Tell whether to save now."""
        if progress.save_cost_s is None:
            return _has_passed(progress, FIRST_SAVE_S)
        return _has_passed(progress, self.interval_s(progress.save_cost_s))

    def interval_s(self, save_cost_s: float) -> float:
        """Return the time to train between two saves.

        Parameters
        ----------
        save_cost_s : float
            By how much one save delays the training, C.

        Notes
        -----
        With M the mean time between failures, Young's sqrt(2 C M) (Communications of
        the ACM 17, 1974, p. 530) holds for C far below M. Daly's estimate of higher
        order (Future Generation Computer Systems 22, 2006, p. 303, eq. 37) equals it
        there, and also holds where saves are dear:

            sqrt(2 C M) (1 + x / 3 + x² / 9) - C,   x = sqrt(C / (2 M)),   C < 2 M,

        and M above. The time that a restart takes has no influence.
        """
        mtbf_s = 3600 * self.mtbf_hours
        if save_cost_s >= 2 * mtbf_s:
            return mtbf_s
        x = math.sqrt(save_cost_s / (2 * mtbf_s))
        young_s = math.sqrt(2 * save_cost_s * mtbf_s)
        return young_s * (1 + x / 3 + x**2 / 9) - save_cost_s


@dataclass(frozen=True, slots=True)
class AnyOf(Trigger):
    """Save when any of several rules says so; what `|` builds.

    Parameters
    ----------
    triggers : tuple of Trigger
        The rules.
    """

    triggers: tuple[Trigger, ...]

    def is_due(self, progress: Progress) -> bool:
        """Tell whether to save now."""
        return any(trigger.is_due(progress) for trigger in self.triggers)


def _alternatives(trigger: Trigger) -> tuple[Trigger, ...]:
    return trigger.triggers if isinstance(trigger, AnyOf) else (trigger,)


def _has_passed(progress: Progress, seconds: float) -> bool:
    if progress.step == progress.last_step:
        return False
    return progress.now_s - progress.last_time_s >= seconds


def _require_positive(trigger: Trigger, value: float) -> None:
    if isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{type(trigger).__name__}({value!r}): expected more than 0")
