"""The library's own duplicates of a user's communicator, made once and kept with it."""

import sys
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from mpickpt.errors import CollectiveTimeoutError
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.line import Fate, Line
from mpickpt.parallel.messages import complete
from mpickpt.parallel.muster import muster
from mpickpt.parallel.roll_call import LISTEN_EVERY_S
from mpickpt.parallel.ulfm import dead_ranks
from mpickpt.parallel.waiting import Deadline, Steps, resolve_timeout_s, run

T = TypeVar("T")

_N_LINES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """What the library talks on for one communicator of the user.

    Four, because an asynchronous save goes on under way while the program saves,
    loads and goes from step to step, and collectives of one communicator must come in
    one order.

    Attributes
    ----------
    save, load, pending, step : Conversation
        One for each kind of call.
    memory : dict
        What calls remember from one to the next, as long as the communicator lives.
    """

    save: Conversation
    load: Conversation
    pending: Conversation
    step: Conversation
    memory: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept in an attribute of the user's communicator."""

    lines: tuple[Line, ...]
    memory: dict[str, Any] = field(default_factory=dict)


def conversations_of(comm: Any, timeout_s: float | None = None) -> Conversations:
    """Return the conversations of a communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        Any intracommunicator; `None` is this process alone, without MPI.
    timeout_s : float, optional
        Seconds that a wait may last without progress; default ``MPICKPT_TIMEOUT_S``,
        else 600. Holds for the conversations returned by this call.

    Raises
    ------
    CollectiveTimeoutError
        Some rank did not make its first call in time, or the communicator was given
        up earlier.

    Notes
    -----
    Collective at the first call for a communicator, local later. The duplicates are
    freed when the user frees the communicator.
    """
    timeout_s = resolve_timeout_s(timeout_s)
    if comm is None:
        return _conversations(_solo_lines(), _solo_memory(), timeout_s)
    mpi = mpi_of(comm)
    kept = comm.Get_attr(_keyval(mpi))
    if isinstance(kept, Fate):
        Line(comm, mpi, kept).raise_if_given_up("first call")
    if kept is None:
        alone = comm.Get_size() == 1
        kept = _Kept(() if alone else run(_open_lines(comm, mpi, timeout_s)))
        comm.Set_attr(_keyval(mpi), kept)
    return _conversations(kept.lines or _solo_lines(), kept.memory, timeout_s)


def mpi_of(comm: Any) -> Any:
    """Return the module that defines the communicator's class.

    Notes
    -----
    It is `mpi4py.MPI`, or a test's double; asking the object means that nothing here
    ever imports mpi4py, which would initialise MPI.
    """
    for cls in type(comm).__mro__:
        if cls.__name__ == "Comm":
            if not comm:
                raise TypeError(
                    "comm is COMM_NULL: it was freed, or this rank is not in it; pass "
                    "one that this rank belongs to, or do not call here"
                )
            if comm.Is_inter():
                raise TypeError(
                    "comm is an intercommunicator; pass an intracommunicator"
                )
            return sys.modules[cls.__module__]
    raise TypeError(
        f"comm must be an mpi4py communicator or None, got {type(comm).__name__}"
    )


def _solo_lines() -> tuple[Line, ...]:
    fate = Fate()
    return tuple(Line(None, None, fate) for _ in range(_N_LINES))


@cache
def _solo_memory() -> dict[str, Any]:
    return {}


def _conversations(
    lines: tuple[Line, ...], memory: dict[str, Any], timeout_s: float
) -> Conversations:
    save, load, pending, step = (Conversation(line, timeout_s) for line in lines)
    return Conversations(
        save=save, load=load, pending=pending, step=step, memory=memory
    )


def _open_lines(comm: Any, mpi: Any, timeout_s: float) -> Steps[tuple[Line, ...]]:
    phase, fate = "first call", Fate()
    user_line = Line(comm, mpi, fate)
    meeting = _meet(user_line, phase, timeout_s)
    try:
        with user_line.translated(phase):
            return (yield from _unless_ranks_die(user_line, phase, meeting))
    except CollectiveTimeoutError as error:
        fate.error = error
        comm.Set_attr(_keyval(mpi), fate)
        raise


def _meet(user_line: Line, phase: str, timeout_s: float) -> Steps[tuple[Line, ...]]:
    yield from muster(user_line, phase, timeout_s)
    lines = []
    for _ in range(_N_LINES):
        lines.append((yield from _duplicate(user_line, phase, timeout_s)))
    return tuple(lines)


def _unless_ranks_die(user_line: Line, phase: str, steps: Steps[T]) -> Steps[T]:
    """Go on unless MPI tells of a death; ranks that wait for others are not told."""
    looked_s = time.monotonic()
    try:
        while True:
            pause = next(steps)
            if time.monotonic() - looked_s > LISTEN_EVERY_S:
                looked_s = time.monotonic()
                dead = dead_ranks(user_line.mpi, user_line.comm)
                if dead:
                    raise user_line.lose(phase, dead)
            yield pause
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def _duplicate(user_line: Line, phase: str, timeout_s: float) -> Steps[Line]:
    duplicate, request = user_line.comm.Idup()
    try:
        yield from complete(request, Deadline(timeout_s), duplicate)
    except TimeoutError:
        raise user_line.give_up(phase, [], "no duplicate was made in time") from None
    duplicate.Set_errhandler(user_line.mpi.ERRORS_RETURN)
    user_line.fate.duplicates.append(duplicate)
    return Line(duplicate, user_line.mpi, user_line.fate)


@cache
def _keyval(mpi: Any) -> int:
    keyval: int = mpi.Comm.Create_keyval(delete_fn=_free_lines)
    return keyval


def _free_lines(_comm: Any, _keyval: int, kept: Any) -> None:
    if isinstance(kept, _Kept):
        for line in kept.lines:
            line.free()
