"""The first meeting of all ranks, on the user's own communicator.

Making a duplicate needs every rank, and until it is made there is no private way to
ask who is missing. Collectives cannot meet the user's messages, so the question is
put by three of them that root serves rank by rank: root tells that it is there, each
rank tells root, root tells whether all came.
"""

from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from mpickpt.parallel.line import ROOT, Line
from mpickpt.parallel.messages import complete
from mpickpt.parallel.roll_call import reason, verdict_s
from mpickpt.parallel.waiting import Deadline, Steps

MOST_NAMED = 8
NOBODY = -1

Ranks = npt.NDArray[np.int32]


def muster(line: Line, phase: str, timeout_s: float) -> Steps[None]:
    """Return when every rank has come.

    Raises
    ------
    CollectiveTimeoutError
        On every rank that has come, naming those that have not.
    """
    line.raise_if_given_up(phase)
    if line.rank == ROOT:
        missing = yield from _muster_as_root(line, timeout_s)
    else:
        missing = yield from _muster_under_root(line, timeout_s)
    if missing:
        raise line.give_up(phase, missing, reason(missing, f" within {timeout_s:g} s"))


def _muster_as_root(line: Line, timeout_s: float) -> Steps[list[int]]:
    yield from _complete(timeout_s, *_scatter(line, []))
    arrived = np.zeros(line.size, dtype=np.int32)
    token = np.ones(1, dtype=np.int32)
    gathering = line.comm.Igatherv(token, arrived, root=ROOT)
    try:
        yield from _complete(timeout_s, gathering, token, arrived)
    except TimeoutError:
        # Reading the buffer of a gather under way: no promise of MPI's, but every MPI
        # gathers vectors rank by rank, and only an error's text depends on it.
        missing = [rank for rank in range(1, line.size) if not arrived[rank]]
        with suppress(TimeoutError):
            yield from _complete(verdict_s(line.size), *_scatter(line, missing))
        return missing
    yield from _complete(timeout_s, *_scatter(line, []))
    return []


def _muster_under_root(line: Line, timeout_s: float) -> Steps[list[int]]:
    token = np.ones(1, dtype=np.int32)
    root_is_there = _scatter(line, [])
    gathering = line.comm.Igatherv(token, None, root=ROOT)
    verdict_request, verdict = _scatter(line, [])
    try:
        yield from _complete(timeout_s, *root_is_there)
        yield from _complete(timeout_s, gathering, token)
        # Root's own deadline began when root came, which was just now.
        yield from _complete(timeout_s + verdict_s(line.size), verdict_request, verdict)
    except TimeoutError:
        return [ROOT]
    return [int(rank) for rank in verdict if rank != NOBODY]


def _scatter(line: Line, missing: list[int]) -> tuple[Any, Ranks]:
    verdict = np.full(MOST_NAMED, NOBODY, dtype=np.int32)
    if line.rank != ROOT:
        return line.comm.Iscatterv(None, verdict, root=ROOT), verdict
    named = missing[:MOST_NAMED]
    verdict[: len(named)] = named
    verdicts = np.tile(verdict, line.size)
    return line.comm.Iscatterv(verdicts, verdict, root=ROOT), verdicts


def _complete(timeout_s: float, request: Any, *buffers: Any) -> Steps[None]:
    return complete(request, Deadline(timeout_s), *buffers)
