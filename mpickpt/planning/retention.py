"""Decides which checkpoints of a run stay; a pure function of what there is.

Whatever the rules say, pinned checkpoints stay and so does the newest good one: a
run never loses the one it could go on from.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpickpt.planning.keep_rules import (
    Candidate,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    parse_keep,
)

__all__ = [
    "Candidate",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "RoomPlan",
    "Verdict",
    "parse_keep",
    "plan_retention",
    "plan_room",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the checkpoint of a step stays, and why, for a person to read."""

    step: int
    keep: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPlan:
    """What to remove so that the next save fits.

    Attributes
    ----------
    remove : tuple of int
        Steps, the first to go first; empty where even all of them would not do.
    missing_nbytes : int
        What would still be missing if all that may go went; 0 where it fits.
    """

    remove: tuple[int, ...]
    missing_nbytes: int

    @property
    def is_enough(self) -> bool:
        """Whether the next save fits after it."""
        return self.missing_nbytes == 0


def plan_retention(
    candidates: Iterable[Candidate], keep: KeepPolicy | int
) -> list[Verdict]:
    """Return for each checkpoint whether it stays, in order of step.

    Parameters
    ----------
    candidates : iterable of Candidate
        All published checkpoints of the run, in any order.
    keep : KeepPolicy or int
        The rules.

    Notes
    -----
    A pinned checkpoint stays, and so does the newest good one, or the newest of all
    where none is known to be good. What stays is kept again by the same rules.
    """
    ordered = _ordered(candidates)
    kept = parse_keep(keep).reasons(ordered)
    newest_good = _newest_good(ordered)
    return [_verdict(one, kept.get(one.step, ()), newest_good) for one in ordered]


def plan_room(
    candidates: Iterable[Candidate],
    keep: KeepPolicy | int,
    *,
    needed_nbytes: int,
    free_nbytes: int,
) -> RoomPlan:
    """Return what to remove, and in which order, so that the next save fits.

    Parameters
    ----------
    candidates : iterable of Candidate
        All published checkpoints of the run, in any order.
    keep : KeepPolicy or int
        The rules. What none of them keeps goes first, then the oldest.
    needed_nbytes, free_nbytes : int
        Size of the next save, and what the file system has free.

    Notes
    -----
    Never a pinned one, never the newest good one. Where all that may go would not be
    enough nothing goes: it would be lost for nothing.
    """
    ordered = _ordered(candidates)
    stays = {verdict.step for verdict in plan_retention(ordered, keep) if verdict.keep}
    newest_good = _newest_good(ordered)
    removable = sorted(
        (one for one in ordered if not one.is_pinned and one.step != newest_good),
        key=lambda one: (one.step in stays, one.step),
    )
    missing, remove = max(0, needed_nbytes - free_nbytes), []
    for candidate in removable:
        if missing == 0:
            break
        remove.append(candidate.step)
        missing = max(0, missing - candidate.nbytes)
    return RoomPlan(remove=tuple(remove) if not missing else (), missing_nbytes=missing)


def _verdict(
    candidate: Candidate, kept: Sequence[str], newest_good: int | None
) -> Verdict:
    reasons = ["pinned", *kept] if candidate.is_pinned else list(kept)
    if not reasons and candidate.step == newest_good:
        reasons = ["newest good one" if candidate.is_good else "newest one"]
    return Verdict(
        step=candidate.step,
        keep=bool(reasons),
        reason=", ".join(reasons) or "no rule keeps it",
    )


def _ordered(candidates: Iterable[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda candidate: candidate.step)


def _newest_good(ordered: Sequence[Candidate]) -> int | None:
    good = [candidate for candidate in ordered if candidate.is_good] or ordered
    return good[-1].step if good else None
