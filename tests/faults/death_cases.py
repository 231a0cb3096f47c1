"""The cases of the death suite: who dies, or stops, in which save or load, and when."""

import random
from collections.abc import Iterator
from functools import cache

from tests.faults.death_strikes import (
    HYDRA,
    LATE,
    LOADS,
    OPEN_MPI,
    PLAIN,
    RANKS,
    SIZE,
    SLOW_S,
    ULFM,
    Strike,
)
from tests.faults.errors_calls import WRITING, Call, listed_calls

SAVING = ("describe", "layout", "prepare", "draft", "write", "amid-write")
STAGING = ("begin", "describe", "layout", "prepare", "draft", "stage", "write")
ENDING = ("agree", "publish")
MOMENTS = {
    "sync": (*SAVING, *ENDING),
    "poll": (*STAGING, *ENDING),
    "thread": (*STAGING, "amid-write", *ENDING),
    "training": ("lease", *STAGING, *ENDING, "retention", "step"),
    "load": ("arguments", "read-manifest", "read-indexes", "match", "amid-read"),
    "reshard": ("arguments", "match", "read", "amid-read", "move", "compare"),
}
OF_ROOT = {
    "sync": ("make-room", "manifest", "published"),
    "poll": ("manifest", "published"),
    "thread": ("manifest", "published"),
    "training": ("manifest", "published", "unpublish"),
}
# By then rank 0 has published, or is about to.
PUBLISHED = ("published", "answer", "retention", "unpublish", "remove-files")

_CHANGING = ("mkdir", "pwrite64", "write", "fsync", "rename", "unlink", "rmdir")
# Which ranks die in a mode: what one of the others does is alike in all modes.
_CALLS_OF = {
    "sync": (0, 1, 2, 3),
    "overwrite": (0, 3),
    "poll": (0, 1),
    "thread": (0, 2),
    "background": (0, 1, 2, 3),
    "rewind": (0,),
}
N_RANDOM = 24
SEED = 20261130


@cache
def strikes() -> dict[str, Strike]:
    """Return all strikes by name, in order."""
    made = [
        *_before_calls(),
        *_at_moments(),
        *_of_all(),
        *_with_survivors(),
        *_stops(),
        *_slow(),
    ]
    return {strike.name: strike for strike in made}


def names_in_ci() -> set[str]:
    """Choose a strike at every other place; ranks and modes take turns."""
    chosen: dict[tuple[str, ...], str] = {}
    for number, strike in enumerate(strikes().values()):
        turn = (number * 2654435761) % 12 == 0
        if turn or _place(strike) not in chosen:
            chosen[_place(strike)] = strike.name
    kinds = {place[0] for place in chosen}
    by_kind = [[p for p in chosen if p[0] == kind] for kind in sorted(kinds)]
    return {chosen[place] for places in by_kind for place in places[::2]}


def _place(strike: Strike) -> tuple[str, ...]:
    """Return what is alike for strikes of which the short part runs one."""
    if strike.call is not None:
        path = "".join("#" if c.isdigit() else c for c in strike.call.path)
        step = path.replace("rank####", "rank").rpartition("/")[2]
        return "call", strike.call.call, step, str(strike.is_published)
    if strike.kind == "random":
        return "random", str(int(strike.name[-2:]) % 3)
    if strike.kind == "all":
        return "all", strike.moment
    kind = "load" if strike.mode in LOADS else "save"
    if strike.slow_s:
        return "slow", kind
    if strike.kind == "stop":
        return "stop", kind, strike.moment
    phase = "late" if strike.is_late else "early"
    if strike.launcher == PLAIN:
        return PLAIN, kind, phase, str(strike.rank == 0)
    return strike.launcher, kind, phase, str(strike.rank == 0)


def _before_calls() -> Iterator[Strike]:
    listed = [call for call in listed_calls() if call.kind == WRITING]
    for mode, ranks in _CALLS_OF.items():
        calls = [call for call in listed if call.mode == mode and _changes(call)]
        calls += [twin for call in calls if (twin := _of_rank_1(call)) is not None]
        last = {(c.rank, c.path): c.number for c in calls if c.call == "pwrite64"}
        roots = [call for call in calls if call.rank == 0]
        commit = next(
            place
            for place, call in enumerate(roots)
            if call.call == "rename" and call.path.endswith("manifest.json.tmp")
        )
        for call in calls:
            many = call.call == "pwrite64" and call.number != 1
            if many and call.number != last[call.rank, call.path]:
                continue
            if call.rank not in ranks or (mode == "rewind" and ".h5" in call.path):
                continue
            removes = call.rank and call.call == "unlink"
            after = removes or (call.rank == 0 and roots.index(call) > commit)
            yield Strike(
                name=f"call/{call.name}",
                kind="call",
                mode=mode,
                rank=call.rank,
                call=call,
                is_published=bool(after),
            )


def _changes(call: Call) -> bool:
    creates = call.call == "openat" and call.number == 1
    creates = creates and call.path.endswith((".tmp", ".json"))
    return call.call in _CHANGING or creates


def _of_rank_1(call: Call) -> Call | None:
    """Return what rank 1 does where rank 2 was recorded: the same, but its share."""
    if call.rank != 2 or call.call == "unlink":
        return None
    path = call.path.replace("rank00002", "rank00001")
    return Call(
        mode=call.mode,
        rank=1,
        call=call.call,
        number=call.number,
        path=path,
        kind=call.kind,
        way=call.way,
        when=call.when,
    )


def _is_published(mode: str, moment: str) -> bool | None:
    if mode in LOADS:
        return True
    if moment in PUBLISHED:
        return True
    return None if moment in ("publish", "step") else False


def _at_moments() -> Iterator[Strike]:
    for mode, moments in MOMENTS.items():
        if mode in LOADS:
            continue
        for moment in ("describe", "layout", "draft", "stage", "agree", "publish"):
            if moment in moments:
                yield from (_killed(mode, rank, moment) for rank in RANKS)
    for mode in ("sync", "thread"):
        for moment in ("amid-write", "manifest", "published"):
            yield _killed(mode, 0, moment, OPEN_MPI)
        yield _killed(mode, 2, "amid-write", OPEN_MPI)
    for rank in RANKS:
        yield _killed("training", rank, "remove-files")
        yield _killed("sync", rank, "answer")


def _killed(mode: str, rank: int, moment: str, launcher: str = PLAIN) -> Strike:
    # A rank that dies when it goes on to publish may not keep rank 0 from it.
    is_published = _is_published(mode, moment)
    if moment == "publish" and rank == 0:
        is_published = False
    return Strike(
        name=f"{launcher}/{mode}/rank{rank}/{moment}",
        kind="moment",
        mode=mode,
        rank=rank,
        moment=moment,
        launcher=launcher,
        is_published=is_published,
    )


def _of_all() -> Iterator[Strike]:
    for mode in ("sync", "poll", "thread", "training"):
        for moment in ("describe", "amid-write", "agree", "manifest", "published"):
            if moment == "amid-write" and mode == "poll":
                continue
            yield Strike(
                name=f"all/{mode}/{moment}",
                kind="all",
                mode=mode,
                rank=0,
                moment=moment,
                is_published=_is_published(mode, moment),
            )
    rng = random.Random(SEED)
    for number in range(N_RANDOM):
        mode = ("sync", "training", "background")[number % 3]
        yield Strike(
            name=f"all/random-{number:02d}",
            kind="random",
            mode=mode,
            rank=0,
            after_s=round(rng.uniform(0.02, 0.6), 4),
        )


def _with_survivors() -> Iterator[Strike]:
    hydra = {
        "sync": ("describe", "prepare", "amid-write", "agree", "publish"),
        "poll": ("draft", "agree"),
        "thread": ("amid-write", "agree"),
        "training": ("lease", "agree", "step", "retention"),
        "load": ("read-manifest", "amid-read"),
        "reshard": ("move",),
    }
    for mode, moments in hydra.items():
        for number, moment in enumerate(moments):
            yield _killed(mode, 0, moment, HYDRA)
            yield _killed(mode, 1 + number % 3, moment, HYDRA)
    yield _killed("sync", 0, "manifest", HYDRA)
    yield _killed("sync", 0, "published", HYDRA)
    for mode, moments in MOMENTS.items():
        for number, moment in enumerate(moments):
            yield _killed(mode, number % SIZE, moment, ULFM)
    for mode, moments in OF_ROOT.items():
        for moment in moments:
            yield _killed(mode, 0, moment, ULFM)


def _stops() -> Iterator[Strike]:
    for mode, moments in MOMENTS.items():
        for number, moment in enumerate(moments):
            for rank in (0, 1 + number % 3):
                yield _stopped(mode, rank, moment)
    for mode, moments in OF_ROOT.items():
        for moment in moments:
            yield _stopped(mode, 0, moment)


def _stopped(mode: str, rank: int, moment: str) -> Strike:
    return Strike(
        name=f"stop/{mode}/rank{rank}/{moment}",
        kind="stop",
        mode=mode,
        rank=rank,
        moment=moment,
        # Whoever goes on before the manifest is renamed may publish after all, if
        # nobody was told otherwise.
        is_published=None if moment in ENDING + LATE else _is_published(mode, moment),
    )


def _slow() -> Iterator[Strike]:
    for mode, moment in (
        ("sync", "describe"),
        ("sync", "amid-write"),
        ("thread", "agree"),
        ("training", "step"),
        ("poll", "publish"),
        ("load", "amid-read"),
        ("reshard", "move"),
    ):
        for rank in (0, 2):
            yield Strike(
                name=f"slow/{mode}/rank{rank}/{moment}",
                kind="stop",
                mode=mode,
                rank=rank,
                moment=moment,
                is_published=True,
                slow_s=SLOW_S,
            )
