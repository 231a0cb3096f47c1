"""What a store is like as a further tier for checkpoints; one process, no MPI."""

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any

from mpickpt.cli.output import nbytes_text, print_json, print_line
from mpickpt.cli.status import FAILED, WHOLE
from mpickpt.doctor.report import print_advice, print_section
from mpickpt.doctor.words import Lines, timing_said
from mpickpt.planning.findings import Advice
from mpickpt.planning.probed import Timing, timing_of
from mpickpt.storage.remote_path import RemotePath
from mpickpt.version import __version__

_TRIES = 10
_QUICK_TRIES = 3
_LARGE_NBYTES = 16 << 20
_QUICK_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFound:
    """What a store does.

    Attributes
    ----------
    url : str
        Where it is.
    honours_conditions : bool
        Whether of two that publish the same name one is refused.
    lists_at_once : bool
        Whether a new file is listed as soon as it was put.
    reads_back : bool
        Whether what was put is what is read, a replaced file included.
    put, read : Timing
        Of a small file.
    put_bps, read_bps : float
        Bytes a second of one process and one request.
    """

    url: str
    honours_conditions: bool
    lists_at_once: bool
    reads_back: bool
    put: Timing
    read: Timing
    put_bps: float
    read_bps: float


def examine_store(run: RemotePath, *, quick: bool) -> StoreFound:
    """Find out what a store does, by files of its own, which are removed again.

    Raises
    ------
    StorageError
        If the store refuses.
    """
    store = run.store
    folder = f"mpickpt-doctor-{secrets.token_hex(4)}"
    small, large = f"{folder}/small", f"{folder}/large"
    count = _QUICK_TRIES if quick else _TRIES
    content = secrets.token_bytes(_QUICK_NBYTES if quick else _LARGE_NBYTES)
    try:
        honours = store.check_conditions()
        versions = [secrets.token_bytes(512) for _ in range(count)]
        puts = [_seconds(partial(store.put, small, version)) for version in versions]
        is_listed = any(found.name == small for found in store.list(f"{folder}/"))
        reads = [_seconds(lambda: store.read(small)) for _ in range(count)]
        is_back = store.read(small) == versions[-1]
        put_s = _seconds(lambda: store.put(large, content))
        read_s = _seconds(lambda: store.read(large))
        is_back = is_back and store.read(large) == content
    finally:
        store.delete([small, large])
    return StoreFound(
        url=str(run),
        honours_conditions=honours,
        lists_at_once=is_listed,
        reads_back=is_back,
        put=timing_of(puts),
        read=timing_of(reads),
        put_bps=len(content) / put_s,
        read_bps=len(content) / read_s,
    )


def advice_on(found: StoreFound) -> list[Advice]:
    """Return what a user should know of a store."""
    said = []
    if not found.reads_back:
        said.append(
            Advice(
                about="wrong bytes",
                is_grave=True,
                what="what was read is not what was put last",
                why="the store, or a cache before it, gives older or other bytes",
                remedy="use another store; ask who runs this one",
            )
        )
    if not found.lists_at_once:
        said.append(
            Advice(
                about="late names",
                what="a new file is not listed at once",
                why="the newest checkpoint may not be found for a while",
                remedy="restart a job some time after the one before it ended",
            )
        )
    if not found.honours_conditions:
        said.append(
            Advice(
                about="conditions",
                what="the store ignores conditions: of two that publish one name none "
                "is refused",
                why="two copiers at once could publish different checkpoints of a "
                "step; the library looks before it publishes, and reads back after it",
                remedy="let one job and one flush at a time copy to a run",
            )
        )
    return said


def report_on_store(run: RemotePath, *, quick: bool, as_json: bool) -> int:
    """Examine a store and print what was found; return the exit status."""
    found = examine_store(run, quick=quick)
    advice = advice_on(found)
    is_well = not any(said.is_grave for said in advice)
    if as_json:
        print_json(_document(found, advice, is_well=is_well))
    else:
        print_line(f"mpickpt {__version__} looks at {found.url}")
        print_section("what it does", list(_behaviour(found)))
        print_section("how fast one request is", list(_speeds(found)))
        print_advice(advice)
    return WHOLE if is_well else FAILED


def _behaviour(found: StoreFound) -> Lines:
    kept = "kept: one of two is refused" if found.honours_conditions else "ignored"
    yield "conditional put", kept
    yield "new names", "listed at once" if found.lists_at_once else "listed late"
    yield "replaced files", "read as put last" if found.reads_back else "WRONG BYTES"


def _speeds(found: StoreFound) -> Lines:
    yield "small put", timing_said(found.put)
    yield "small read", timing_said(found.read)
    yield "put", f"{nbytes_text(int(found.put_bps))}/s"
    yield "read", f"{nbytes_text(int(found.read_bps))}/s"


def _document(
    found: StoreFound, advice: list[Advice], *, is_well: bool
) -> dict[str, Any]:
    listed = [asdict(said) for said in advice]
    return {**asdict(found), "advice": listed, "is_well": is_well}


def _seconds(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin
