"""Saves while the program goes on: stage first, then write, agree and publish."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mpickpt.errors import CallMismatchError, CheckpointError
from mpickpt.parallel.communicators import Conversations, mpi_of
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.describe import memory_of
from mpickpt.parallel.logs import log_as_asked
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.parallel.pending_save import PendingSave, pending_of
from mpickpt.parallel.save_call import (
    SaveCall,
    conversations_of_save,
    nothing_published,
    place_and_options,
)
from mpickpt.parallel.save_steps import Save
from mpickpt.parallel.waiting import Steps, run
from mpickpt.storage.checkpoint_writer import write_staged_file
from mpickpt.storage.staging import Staging, yield_cpu
from mpickpt.storage.stream import ShardDigest

Progress = Literal["auto", "poll", "thread"]
OnBusy = Literal["wait", "skip", "error"]
ON_BUSY: tuple[OnBusy, ...] = ("wait", "skip", "error")

AfterPublish = Callable[[Conversation, SaveResult], Steps[None]]


def save_sharded_async(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    step: int,
    comm: Any = None,
    metadata: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions | None = None,
    progress: Progress = "auto",
    on_busy: OnBusy = "wait",
) -> PendingSave | None:
    """Save a state as one checkpoint while the program goes on.

    Parameters
    ----------
    tree, path, step, comm, metadata, metrics, overwrite, options
        As in `save_sharded`.
    progress : {"auto", "poll", "thread"}
        Who drives the agreement: "poll", the program by calling `poll`, for which
        MPI_THREAD_FUNNELED is enough; "thread", a thread, which needs
        MPI_THREAD_MULTIPLE; "auto", a thread where MPI allows it.
    on_busy : {"wait", "skip", "error"}
        What to do while the save before is still under way on some rank: wait for
        it, return None on every rank, or raise on every rank.

    Returns
    -------
    PendingSave or None
        The state was copied and may change. None where the save was skipped.

    Raises
    ------
    CheckpointError
        As `save_sharded`, for all that goes wrong until the state is copied; and
        what went wrong in the background of the save before, if nobody has asked
        for its result.

    Notes
    -----
    Collective. Not thread-safe. *Not* durable when it returns: `PendingSave.result`
    tells, and where nobody asks before the program ends, the save may stay unpublished.
    The copy takes as much memory as the state, kept for the next save.
    """
    log_as_asked()
    directory, options, unusable = place_and_options(path, options)
    talks = conversations_of_save(comm, options)
    driver = "poll"
    try:
        on_busy = known_on_busy(on_busy)
        driver = resolved_progress(progress, comm)
    except ValueError as error:
        on_busy = on_busy if on_busy in ON_BUSY else "wait"
        unusable = error
    call = SaveCall(
        state=lambda: tree,
        directory=directory,
        step=step,
        metadata=metadata,
        metrics=metrics,
        overwrite=overwrite,
        options=options,
        comm=comm,
        unusable=unusable,
    )
    return begin_save(talks, call, progress=driver, on_busy=on_busy)


def begin_save(
    talks: Conversations,
    call: SaveCall,
    *,
    progress: str,
    on_busy: OnBusy,
    owner: object = None,
    after: AfterPublish | None = None,
) -> PendingSave | None:
    """Stage a save and let the rest of it go on; see `save_sharded_async`.

    Parameters
    ----------
    talks, call
        The ranks, and the arguments of the save.
    progress, on_busy
        As there; `progress` is resolved.
    owner : object
        Who asks for the result; nobody else is told what went wrong.
    after : callable of (Conversation, SaveResult), optional
        Steps that belong to the save and follow its publishing.
    """
    known_on_busy(on_busy)
    earlier = pending_of(talks)
    with nothing_published():
        may_begin = run(_may_begin(talks, earlier, on_busy))
    if not may_begin:
        return None
    if earlier is not None:
        earlier.finish()
        if earlier.owner is owner:
            earlier.settle()
    memory = memory_of(talks.memory, call.run_key)
    save = Save(talks.pending, memory, call)
    staging = talks.memory.setdefault("staging", Staging())
    steps = run(_staged(save, staging))
    if after is not None:
        steps = _followed(steps, talks.pending, after)
    threaded = progress == "thread"
    pending = PendingSave(call.step, call.directory, steps, owner, threaded=threaded)
    pending.poll()  # so that the writing begins, whoever drives it
    talks.memory["pending"] = pending
    return pending


def _followed(
    steps: Steps[SaveResult], talk: Conversation, after: AfterPublish
) -> Steps[SaveResult]:
    result = yield from steps
    yield from after(talk, result)
    return result


def _may_begin(
    talks: Conversations, earlier: PendingSave | None, on_busy: OnBusy
) -> Steps[bool]:
    """Tell whether to begin a save; the same answer on every rank."""
    busy = earlier is not None and not earlier.poll()
    own = bytes([busy, ON_BUSY.index(on_busy)])
    answers = yield from talks.save.allgather(own, "begin")
    others = [rank for rank, (_, asked) in enumerate(answers) if asked != answers[0][1]]
    if others:
        raise CallMismatchError(
            f"rank {others[0]} passed another on_busy than rank 0; every rank must "
            "pass the same",
            rank=others[0],
        )
    if on_busy == "wait" or not any(busy for busy, _ in answers):
        return True
    if on_busy == "error":
        raise CheckpointError(
            "the save before is still under way; wait for its result(), or pass "
            "on_busy='wait' or 'skip'"
        )
    return False


def _staged(save: Save, staging: Staging) -> Steps[Steps[SaveResult]]:
    """Do what the program waits for; return the steps that go on without it."""
    drafted = yield from save.drafted()
    with save.nothing_left_behind(), save.timed("stage"):
        staged = yield from save.talk.agree(
            lambda: staging.hold(drafted.draft), "stage"
        )

    style = save.style

    def write(path: Path, cancelled: threading.Event) -> ShardDigest:
        yield_cpu()
        return write_staged_file(path, staged, style, cancelled)

    save.forget_state()
    return save.published(drafted.without_arrays(), write, staged.content)


def resolved_progress(progress: Progress, comm: Any) -> str:
    """Return who drives a save, having asked MPI what it allows."""
    if progress not in ("auto", "poll", "thread"):
        raise ValueError(f"progress {progress!r} is not 'auto', 'poll' or 'thread'")
    if progress == "poll":
        return progress
    multiple = True
    if comm is not None and comm.Get_size() > 1:
        mpi = mpi_of(comm)
        multiple = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
    if progress == "thread" and not multiple:
        raise ValueError(
            "progress='thread' needs MPI_THREAD_MULTIPLE, which this MPI was not "
            "initialised with; use progress='poll'"
        )
    return "thread" if multiple else "poll"


def known_on_busy(on_busy: OnBusy) -> OnBusy:
    """Return the argument if it is one of those that are known."""
    if on_busy not in ON_BUSY:
        raise ValueError(f"on_busy {on_busy!r} is not 'wait', 'skip' or 'error'")
    return on_busy
