"""Measures how late other nodes see what one node has changed and told them of.

The node that writes is another one each time. It says that it is done by a barrier, as
the ranks of a save do, and the others look from then on.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpickpt.bench.ranks import Ranks
from mpickpt.doctor.visit import Visit
from mpickpt.planning.findings import DelayFound
from mpickpt.planning.probed import timing_of
from mpickpt.storage.commit import publish, write_new_file
from mpickpt.storage.probes import append_durably
from mpickpt.storage.second_look import PATIENCE_S, list_afresh, meet

_OLD, _NEW = b"old", b"new"
_FIRST_SLEEP_S = 0.5e-3
_LONGEST_SLEEP_S = 20e-3
_LISTED_SLEEP_S = 0.25
_LONG_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The ranks that look for changes.

    Attributes
    ----------
    ranks : Ranks
        All of the job.
    leaders : tuple of int
        The first rank of each host, which writes and looks.
    visit : Visit
        Where, and how often; all of them see the directory.
    """

    ranks: Ranks
    leaders: Sequence[int]
    visit: Visit


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One kind of change, and how it is seen.

    Attributes
    ----------
    name : str
        What is changed.
    prepare : callable
        By the node that writes, before the others look for the first time.
    look : callable
        By the others, before the change: what they are going to remember.
    make : callable
        The change.
    is_seen : callable
        Whether it is seen.
    """

    name: str
    prepare: Callable[[Path], object]
    look: Callable[[Path], object]
    make: Callable[[Path], object]
    is_seen: Callable[[Path], bool]


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look found: after how long, or only after listing, or not at all."""

    delay_s: float
    was_listed: bool = False
    is_missing: bool = False


def measure_delays(watch: Watch) -> tuple[DelayFound, ...]:
    """Return how late each kind of change is seen; nothing on one host.

    Notes
    -----
    Collective.
    """
    if len(watch.leaders) < 2:
        return ()
    return tuple(_delay(watch, change) for change in CHANGES)


def _delay(watch: Watch, change: Change) -> DelayFound:
    sights: list[Sight] = []
    waited_s = 0.0
    for number in range(watch.visit.effort.rounds):
        writer = watch.leaders[number % len(watch.leaders)]
        path = watch.visit.work / f"{change.name.replace(' ', '-')}-{number}"
        own = _round(watch, change, path, writer)
        of_all = watch.ranks.all_of(own)
        sights += [sight for sight in of_all if sight is not None]
        waited_s += max((sight.delay_s for sight in of_all if sight), default=0.0)
        # What is late is late again, and all ranks wait for it.
        if waited_s > _LONG_S:
            break
    by_themselves = [s.delay_s for s in sights if not (s.was_listed or s.is_missing)]
    timing = timing_of(by_themselves or [0.0])
    return DelayFound(
        change=change.name,
        count=len(sights),
        median_s=timing.median_s,
        worst_s=timing.worst_s,
        n_listed=sum(sight.was_listed for sight in sights),
        n_missing=sum(sight.is_missing for sight in sights),
        limit_s=watch.visit.effort.limit_s,
    )


def _round(watch: Watch, change: Change, path: Path, writer: int) -> Sight | None:
    """Return what this rank sees of one change; None if it is not to look."""
    ranks, ask = watch.ranks, watch.visit.asking.ask
    writes = ranks.rank == writer
    looks = ranks.rank in watch.leaders and not writes
    if writes:
        ask(change.name, lambda: change.prepare(path))
    ranks.barrier()
    if looks:
        ask(change.name, lambda: change.look(path))
    ranks.barrier()
    is_made = True
    if writes:
        is_made = ask(change.name, lambda: (change.make(path), True)[1]) is True
    if not ranks.all_of(is_made)[writer] or not looks:
        return None
    return ask(change.name, lambda: sight_of(change, path, watch.visit.effort.limit_s))


def sight_of(change: Change, path: Path, limit_s: float) -> Sight:
    """Look for a change that was made until it is seen, or for `limit_s`.

    Only then is the directory listed, as the library would.
    """
    begin, pause_s = time.perf_counter(), _FIRST_SLEEP_S
    while True:
        is_seen = change.is_seen(path)
        delay_s = time.perf_counter() - begin
        if is_seen:
            # What the first look finds was there before it.
            return Sight(delay_s if pause_s > _FIRST_SLEEP_S else 0.0)
        if delay_s > limit_s:
            break
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_SLEEP_S)
    is_seen = _is_seen_when_listed(change, path)
    return Sight(delay_s, was_listed=is_seen, is_missing=not is_seen)


def _is_seen_when_listed(change: Change, path: Path) -> bool:
    """Look as the library does: list the directory before, for a few seconds."""
    end = time.perf_counter() + PATIENCE_S
    while True:
        list_afresh(path.parent)
        is_seen = change.is_seen(path)
        if is_seen or time.perf_counter() > end:
            return is_seen
        time.sleep(_LISTED_SLEEP_S)


def _nothing(_: Path) -> None:
    """Neither prepare nor look."""


def _write_old(path: Path) -> None:
    write_new_file(path, _OLD)


def _write_new(path: Path) -> None:
    write_new_file(path, _NEW)


def _replace(path: Path) -> None:
    tmp = path.with_name(path.name + ".new")
    write_new_file(tmp, _NEW)
    publish(tmp, path)


def _grow(path: Path) -> None:
    append_durably(path, _NEW)


def _look_for(path: Path) -> None:
    os.path.lexists(path)


def _read(path: Path) -> None:
    meet(path)
    path.read_bytes()


def _is_there(path: Path) -> bool:
    return _content(path) == _NEW


def _has_grown(path: Path) -> bool:
    try:
        return path.stat().st_size == len(_OLD + _NEW)
    except OSError:
        return False


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


CHANGES = (
    Change(
        name="new name",
        prepare=_nothing,
        look=_nothing,
        make=_write_new,
        is_seen=_is_there,
    ),
    Change(
        name="name looked up before",
        prepare=_nothing,
        look=_look_for,
        make=_write_new,
        is_seen=_is_there,
    ),
    Change(
        name="replaced file",
        prepare=_write_old,
        look=_read,
        make=_replace,
        is_seen=_is_there,
    ),
    Change(
        name="grown file",
        prepare=_write_old,
        look=_read,
        make=_grow,
        is_seen=_has_grown,
    ),
)
