"""Judges what ranks said after one of them died or stopped, and what it left."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tests.faults.death_strikes import GRACE_S, LOADS, ULFM, Strike
from tests.faults.matrix import Verdict

Said = Mapping[str, Any]

LATER_S = 5.0  # of a machine that does other things too; "at once" is 1 ms
AT_ONCE_S = 5.0  # likewise, after the death; MPI tells in 0.1 s
TIMEOUT_ERROR = "CollectiveTimeoutError"
OLD_OF = {"training": {1: 1, 2: 2}, "background": {1: 1, 2: 2}, "rewind": {1: 1, 2: 2}}
NEW_OF = {"training": 3, "background": 3, "rewind": 3, "overwrite": 1}


def joined(complaints: Sequence[tuple[str, str]]) -> Verdict:
    """Return the verdict of complaints, each a column and a text."""
    columns = {f.name: "" for f in fields(Verdict)}
    for column, text in complaints:
        columns[column] += f"; {text}" if columns[column] else text
    return Verdict(**columns)


def complaints_of_survivors(
    strike: Strike, said: Mapping[int, Said | None], steps: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Judge what each rank that lives said; `steps` were published in the end."""
    published = _has_new(strike, steps)
    for rank in strike.survivors:
        told = said.get(rank)
        if told is None:
            yield "hung", f"rank {rank} said nothing"
            continue
        first = told["first"]
        waited_s = first["ended"] - told["struck"] if told["struck"] else 0.0
        if waited_s > _longest_s(strike):
            yield "hung", f"rank {rank} raised {waited_s:.1f} s after it"
        if strike.slow_s:
            if first["class"] is not None:
                yield "wrong_error", f"rank {rank}, one being slow: {first}"
        elif first["class"] is None:
            if not strike.is_late:
                yield "silent", f"rank {rank} ended well without rank {strike.rank}"
            elif not published:
                yield "silent", f"rank {rank} ended well, but nothing is published"
        else:
            yield from _complaints_of_error(strike, rank, told, published=published)


def complaints_of_victim(
    strike: Strike, told: Said | None, steps: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Judge what the rank said that was stopped and went on."""
    if told is None:
        yield "hung", f"rank {strike.rank} said nothing after it went on"
        return
    if not told["struck"]:
        yield "silent", "nobody was stopped: the moment did not come"
    first, published = told["first"], _has_new(strike, steps)
    if strike.slow_s:
        if first["class"] is not None:
            yield "wrong_error", f"the slow rank: {first}"
    elif first["class"] is None:
        if not published or not strike.is_late:
            yield "silent", f"rank {strike.rank} went on as if nothing were"
    elif first["class"] != TIMEOUT_ERROR:
        yield "wrong_error", f"rank {strike.rank}, that was stopped: {first}"
    elif first["outcome"] == "unpublished" and published:
        yield "silent", f"rank {strike.rank} says unpublished, but it is published"


def complaints_of_next_start(
    strike: Strike, said: Sequence[Said]
) -> Iterator[tuple[str, str]]:
    """Judge what the ranks of the next start said."""
    if not said[0]["found"]["steps"]:
        yield "lost", "no checkpoint is there"
    for rank, told in enumerate(said):
        for name in ("load", "again", "last"):
            if told[name]["class"] is not None:
                yield "lost", f"rank {rank}, {name}: {told[name]['text']}"
    yield from _complaints_of_values(strike, dict(said[0]["values"]))
    if said[0]["rubbish"]:
        yield "rubbish", ", ".join(said[0]["rubbish"])


def _complaints_of_values(
    strike: Strike, values: Mapping[int, int]
) -> Iterator[tuple[str, str]]:
    """Judge whose states the published steps hold, and whether the new one is there."""
    old, new = OLD_OF.get(strike.mode, {1: 1}), NEW_OF.get(strike.mode, 2)
    for step, value in values.items():
        is_known = value == old.get(step) or (step, value) == (new, _new(strike))
        if not is_known and strike.kind != "random":
            yield "silent", f"step {step} holds the state of {value}"
    is_new = values.get(new) == _new(strike)
    is_told = strike.is_published is not None and strike.mode not in LOADS
    if is_told and values and is_new != strike.is_published:
        yield "silent", f"the new one is there: {is_new}; steps {sorted(values)}"


def _complaints_of_error(
    strike: Strike, rank: int, told: Said, *, published: bool
) -> Iterator[tuple[str, str]]:
    first, later = told["first"], told["later"]
    if first["class"] != TIMEOUT_ERROR:
        yield "wrong_error", f"rank {rank}: {first['class']}: {first['text']}"
        return
    if not _names_the_missing(strike, first["missing_ranks"]):
        yield "wrong_error", f"rank {rank}, missing: {first}"
    if not first["phase"] or not first["text"]:
        yield "wrong_error", f"rank {rank} names no phase"
    if first["outcome"] not in _outcomes(strike):
        yield "wrong_error", f"rank {rank} says {first['outcome']}: {first['text']}"
    if first["outcome"] == "unpublished" and published:
        yield "silent", f"rank {rank} says unpublished, but it is published"
    if later["class"] != TIMEOUT_ERROR:
        yield "wrong_error", f"rank {rank}, later: {later}"
    elif later["seconds"] > LATER_S:
        yield "hung", f"rank {rank}, later: {later['seconds']:.1f} s"


def _names_the_missing(strike: Strike, missing: Sequence[int]) -> bool:
    if strike.is_late and strike.launcher != ULFM:
        # Ranks whose save has ended well are away too, from those that still wait.
        return bool(missing)
    return missing == [strike.rank]


def _outcomes(strike: Strike) -> tuple[str | None, ...]:
    """Return what the error may say of the new checkpoint."""
    if strike.mode in LOADS:
        return (None,)
    if strike.is_published is False and _is_before_agree(strike):
        return ("unpublished",)
    if strike.moment == "step":
        return ("unpublished", "unknown", None)  # None: no save was under way
    return ("unpublished", "unknown")


def _is_before_agree(strike: Strike) -> bool:
    return strike.moment not in ("agree", "publish", "manifest")


def _longest_s(strike: Strike) -> float:
    if strike.launcher == ULFM:
        return AT_ONCE_S
    return strike.timeout_s + GRACE_S


def _new(strike: Strike) -> int:
    return 3 if strike.mode in ("training", "background", "rewind") else 2


def _has_new(strike: Strike, steps: Sequence[int]) -> bool:
    return strike.mode in LOADS or NEW_OF.get(strike.mode, 2) in steps
