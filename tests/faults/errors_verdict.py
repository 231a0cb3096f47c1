"""Judges what the ranks said of one case of the errors suite."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.matrix import Verdict

HUNG_S = 10.0  # a save takes a tenth of a second; its deadline is 30 s
NOT_FOUND = "CheckpointNotFoundError"

# Whose state must load afterwards, by mode: before, of the save, of the next one.
STEPS = {
    "overwrite": (1, 2, 3),
    "manager": (2, 3, 4),
    "background": (2, 3, 4),
    "rewind": (1, 3, 4),
    "beat": (3, 5, 6),
}
_STEPS = (1, 2, 3)

Ranks = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a case may lead to.

    Attributes
    ----------
    mode : str
        The way to save.
    ranks : frozenset of int
        Ranks whose failure it can be.
    errnos : frozenset of int
        What the error may say.
    path : str or None
        What the error must name, relative to the run; None for anything in it.
    must_raise : bool
        Whether a save that returned would have lied.
    may_be_unknown : bool
        Whether taking back may have failed too, and files may lie until the next
        save.
    """

    mode: str
    ranks: frozenset[int]
    errnos: frozenset[int]
    path: str | None = None
    must_raise: bool = False
    may_be_unknown: bool = False


def verdict_of(expected: Expected, run: str, ranks: Ranks) -> Verdict:
    """Return what was wrong."""
    return Verdict(
        lost=_lost(expected, ranks),
        silent=_silent(expected, ranks),
        hung=_hung(ranks),
        wrong_error=_wrong_error(expected, run, ranks),
        rubbish=_rubbish(expected, ranks),
    )


def _lost(expected: Expected, ranks: Ranks) -> str:
    old, new, last = STEPS.get(expected.mode, _STEPS)
    allowed = {old}
    if expected.mode == "overwrite" and not _failed(ranks):
        allowed = {new}
    elif expected.mode == "overwrite" and _is_unknown(ranks):
        allowed = {old, new}
    found = _answers(ranks, "old")
    problems = []
    if len(found) != 1 or not found <= allowed:
        problems.append(f"what was there before: {found}, not {allowed}")
    problems += [
        f"{word}: {rank[word]['class']}: {rank[word].get('text')}"
        for rank in ranks[:1]
        for word in ("again", "end")
        if rank[word]["class"] is not None
    ]
    if _answers(ranks, "last") != {last}:
        problems.append(f"the next save: {_answers(ranks, 'last')}, not {last}")
    return "; ".join(problems)


def _silent(expected: Expected, ranks: Ranks) -> str:
    _, new, _ = STEPS.get(expected.mode, _STEPS)
    found = _answers(ranks, "new")
    if not _failed(ranks):
        if expected.must_raise:
            return "the save returned as if nothing had failed"
        return "" if found == {new} else f"it returned, and what loads is {found}"
    if _is_unknown(ranks) or expected.mode == "overwrite" or found == {NOT_FOUND}:
        return ""
    return f"the save failed, and yet its checkpoint: {found}"


def _hung(ranks: Ranks) -> str:
    words = ("old", "new", "again", "last", "end")
    slow = {w: r[w]["seconds"] for r in ranks for w in words}
    slow["save"] = max(rank["seconds"] for rank in ranks)
    slow = {word: round(s, 1) for word, s in slow.items() if s > HUNG_S}
    return f"seconds: {slow}" if slow else ""


def _wrong_error(expected: Expected, run: str, ranks: Ranks) -> str:
    if not any(ranks[rank]["hits"] for rank in expected.ranks):
        return "the fault did not come"
    if {rank["class"] for rank in ranks} == {None}:
        return ""
    wrong = []
    said = {name: {str(rank.get(name)) for rank in ranks} for name in _SAME}
    wrong += [f"{name}s {told}" for name, told in said.items() if len(told) != 1]
    first = ranks[0]
    if first["class"] != "StorageError":
        wrong.append(f"a {first['class']}")
    if first.get("rank") not in expected.ranks:
        wrong.append(f"rank {first.get('rank')}, not {set(expected.ranks)}")
    elif first.get("host") != ranks[first["rank"]]["host here"]:
        wrong.append(f"host {first.get('host')}")
    if first.get("errno") not in expected.errnos:
        wrong.append(f"errno {first.get('errno')}, not {set(expected.errnos)}")
    path = str(first.get("path"))
    if not _is_right(path, expected.path, run) or path not in first.get("text", ""):
        wrong.append(f"path {path}, not {expected.path}")
    if first.get("outcome") not in (None, "unknown") or (
        _is_unknown(ranks) and not expected.may_be_unknown
    ):
        wrong.append(f"outcome {first.get('outcome')}")
    return f"{'; '.join(wrong)}: {first.get('text')}" if wrong else ""


def _rubbish(expected: Expected, ranks: Ranks) -> str:
    if ranks[0]["rubbish"]:
        return f"after the next save: {ranks[0]['rubbish']}"
    left = [name for name in ranks[0]["left"] if ".rejected-" not in name]
    if _failed(ranks) and left and not expected.may_be_unknown:
        return f"after the failed save: {left}"
    return ""


_SAME = ("class", "text", "rank", "host", "errno", "path", "outcome")


def _failed(ranks: Ranks) -> bool:
    return ranks[0]["class"] is not None


def _is_unknown(ranks: Ranks) -> bool:
    return ranks[0].get("outcome") == "unknown"


def _answers(ranks: Ranks, word: str) -> set[Any]:
    """Return whose state the ranks loaded, or the classes of their errors."""
    return {
        said.get("value") if said["class"] is None else said["class"]
        for said in (rank[word] for rank in ranks)
    }


def _is_right(said: str, path: str | None, run: str) -> bool:
    if path is None:
        return said == run or said.startswith(f"{run}/")
    return said == (run if path == "." else f"{run}/{path}")
