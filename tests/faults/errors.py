"""A file system that refuses one system call of a save: every call, every errno.

The calls are those that strace saw in good saves (`errors_calls`). Four ranks save
while one call of one of them fails; then what was there before must load byte for
byte, the next save of the same process must succeed, and nothing may lie about.
`errors_disks` has disks that really fill, are remounted, or let nobody write.
"""

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults import errors_disks
from tests.faults.errors_calls import LOOKING, MODES, PROGRAM, Call, listed_calls
from tests.faults.errors_runner import Job, Said, side_by_side
from tests.faults.errors_verdict import Expected, verdict_of
from tests.faults.matrix import Case, Verdict

ERRNOS = ("ENOSPC", "EDQUOT", "EIO", "ESTALE")
CHANGES = "openat,write,pwrite64,fsync,close,rename,mkdir,unlink,rmdir"

# Modes that look at the disk by the functions of another one, where it is failed.
_LOOKS_AS = {
    "poll": "sync",
    "thread": "sync",
    "background": "manager",
    "rewind": "manager",
}
# Modes that write by the functions of another one, where they see every errno.
_TWO_ERRNOS = ("poll", "background")


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What strace does to one call, or to it and others, and what may come of it."""

    name: str
    call: Call
    errno: str
    inject: str
    expected: Expected

    def as_case(self) -> Said:
        """Return it as the MPI program takes it."""
        return {
            "name": self.name,
            "rank": self.call.rank,
            "inject": self.inject,
            "paths": [self.call.path],
            "way": self.call.way,
        }


@cache
def injections() -> dict[str, Injection]:
    """Return all injections by the name of their case, in order."""
    calls = listed_calls()
    looks = {_place(call, call.mode) for call in calls if call.kind == LOOKING}
    committed = _places_of_commit(calls)
    made: list[Injection] = []
    for place, call in enumerate(calls):
        is_before = place <= committed[call.mode] or call.rank != 0
        must_raise = is_before and _must_be_told(call)
        if call.kind != LOOKING:
            names = ERRNOS
            if call.mode in _TWO_ERRNOS:
                names = names[place % 2 :: 2]
            made += [_once(call, name, must_raise=must_raise) for name in names]
        elif _place(call, _LOOKS_AS.get(call.mode, "")) not in looks:
            made.append(_once(call, ERRNOS[place % len(ERRNOS)], must_raise=False))
        if call.call == "fsync":
            made.append(_from_there_on(call, must_raise=must_raise))
        if call.call == "pwrite64":
            made.append(_takes_nothing(call))
    firsts: dict[Any, Call] = {}
    for call in calls:
        if call.kind != LOOKING:
            firsts.setdefault((call.mode, call.rank, call.path), call)
    made += [_every_change(call) for call in firsts.values()]
    return {injection.name: injection for injection in made}


def _place(call: Call, mode: str) -> tuple[Any, ...]:
    return mode, call.rank, call.call, call.number, call.path


def _places_of_commit(calls: Sequence[Call]) -> dict[str, int]:
    """Return where in the list each mode's checkpoint is published, durably."""
    return {
        call.mode: place
        for place, call in enumerate(calls)
        if (call.rank, call.call, call.path) == (0, "fsync", ".")
    }


def _must_be_told(call: Call) -> bool:
    """Tell whether a checkpoint published after the failure would not be durable.

    Rubbish may stay for the next sweep, and what was synced needs no good close.
    """
    is_close_of_directory = call.call == "close" and not Path(call.path).suffix
    is_removal = call.call in ("unlink", "rmdir")
    return not (call.kind == LOOKING or is_removal or is_close_of_directory)


def _once(call: Call, error: str, *, must_raise: bool) -> Injection:
    # A directory whose parent was stale is made at the second look.
    must_raise = must_raise and (call.call, error) != ("mkdir", "ESTALE")
    return Injection(
        name=f"{call.name}/{error}",
        call=call,
        errno=error,
        inject=f"{call.call}:error={error}:when={call.when}",
        expected=_expected(call, error, path=call.path, must_raise=must_raise),
    )


def _from_there_on(call: Call, *, must_raise: bool) -> Injection:
    return Injection(
        name=f"{call.name}/EIO-from-there-on",
        call=call,
        errno="EIO",
        inject=f"fsync:error=EIO:when={call.when}+",
        expected=_expected(
            call, "EIO", path=call.path, must_raise=must_raise, may_be_unknown=True
        ),
    )


def _takes_nothing(call: Call) -> Injection:
    """Have the file system take no byte, once and again: not for ever a short write."""
    return Injection(
        name=f"{call.name}/takes-nothing",
        call=call,
        errno="EIO",
        inject=f"pwrite64:retval=0:when={call.when}+",
        expected=_expected(call, "EIO", path=call.path, must_raise=True),
    )


def _every_change(call: Call) -> Injection:
    return Injection(
        name=f"{call.mode}/rank{call.rank}/every-change/{call.path}/EIO",
        call=call,
        errno="EIO",
        inject=f"{CHANGES}:error=EIO",
        expected=_expected(call, "EIO", may_be_unknown=True),
    )


def _expected(call: Call, error: str, **more: Any) -> Expected:
    errnos = frozenset({int(getattr(errno, error))})
    return Expected(mode=call.mode, ranks=frozenset({call.rank}), errnos=errnos, **more)


def in_ci(names: Sequence[str]) -> set[str]:
    """Choose a case of every call on every kind of path; errnos, ranks take turns.

    Of the modes of saving the first has all of them, of the others one in three.
    """
    groups: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name in names:
        call = injections()[name].call
        which = name.rpartition("/")[2]
        manner = which if which not in ERRNOS else ""
        if "/every-change/" in name:
            manner = "every change"
        # What is looked at is looked at alike in all modes.
        mode = "" if call.kind == LOOKING else call.mode
        place = (call.call, kind_of(call.path), manner)
        groups.setdefault(place, {}).setdefault(mode, []).append(name)
    chosen = [
        same
        for turn, by_mode in enumerate(groups.values())
        for number, same in enumerate(by_mode.values())
        if number == 0 or (turn + number) % 3 == 0
    ]
    return {same[(7 * turn) % len(same)] for turn, same in enumerate(chosen)}


def kind_of(path: str) -> str:
    """Return a path without its numbers."""
    return "".join("#" if c.isdigit() else c for c in path)


class Errors:
    """The suite."""

    name = "errors"

    def why_not(self) -> str | None:
        """Return what this machine lacks for the suite, or None."""
        for tool in ("strace", "setpriv"):
            if shutil.which(tool) is None:
                return f"{tool} is not installed"
        if os.geteuid() != 0:
            return "tracing and mounting need root"
        return None

    def cases(self) -> Sequence[Case]:
        """Return all cases, always in the same order."""
        names = list(injections())
        short = in_ci(names)
        made = [Case(name=name, in_ci=name in short) for name in names]
        return [*made, *errors_disks.cases()]

    def run(
        self, cases: Sequence[Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run the cases of each mode in a few programs, two programs at a time."""
        by_name = {case.name: case for case in cases}
        jobs = []
        for mode in MODES:
            names = [name for name in by_name if name in injections()]
            own = [name for name in names if injections()[name].call.mode == mode]
            for part in (own[::2], own[1::2]):
                jobs.append(_job(mode, part))
        with errors_disks.jobs(list(by_name), folder) as more:
            for name, verdict in side_by_side([*jobs, *more], folder):
                yield by_name[name], verdict


def _job(mode: str, names: Sequence[str]) -> Job:
    return Job(
        arguments=(str(PROGRAM), mode),
        cases=tuple(injections()[name].as_case() for name in names),
        judge=_judge,
    )


def _judge(said: Said) -> Verdict:
    return verdict_of(injections()[said["case"]].expected, said["run"], said["ranks"])


SUITE = Errors()
