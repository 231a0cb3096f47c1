"""Saves while the program goes on: stage first, then write, agree and publish."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from mpickpt.errors import CheckpointError
from mpickpt.parallel.communicators import Conversations, conversations_of, mpi_of
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.describe import memory_of
from mpickpt.parallel.logs import log_as_asked
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.parallel.save_call import SaveCall
from mpickpt.parallel.save_steps import Save
from mpickpt.parallel.waiting import Steps, run
from mpickpt.storage.checkpoint_writer import write_staged_file
from mpickpt.storage.staging import Staging, yield_cpu
from mpickpt.storage.stream import ShardDigest

Progress = Literal["auto", "poll", "thread"]
OnBusy = Literal["wait", "skip", "error"]

AfterPublish = Callable[[Conversation, SaveResult], Steps[None]]

POLL_S = 1e-3


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
) -> "PendingSave | None":
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
    tells. The copy takes as much memory as the state, kept for the next save.
    """
    log_as_asked()
    options = options or SaveOptions()
    call = SaveCall(
        state=lambda: tree,
        directory=Path(os.path.abspath(path)),
        step=step,
        metadata=metadata,
        metrics=metrics,
        overwrite=overwrite,
        options=options,
        comm=comm,
    )
    talks = conversations_of(comm, options.timeout_s)
    return begin_save(
        talks, call, progress=resolved_progress(progress, comm), on_busy=on_busy
    )


def begin_save(
    talks: Conversations,
    call: SaveCall,
    *,
    progress: str,
    on_busy: OnBusy,
    after: AfterPublish | None = None,
) -> "PendingSave | None":
    """Stage a save and let the rest of it go on; see `save_sharded_async`.

    Parameters
    ----------
    talks, call
        The ranks, and the arguments of the save.
    progress, on_busy
        As there; `progress` is resolved.
    after : callable of (Conversation, SaveResult), optional
        Steps that belong to the save and follow its publishing.
    """
    earlier: PendingSave | None = talks.memory.get("pending")
    if not run(_may_begin(talks, earlier, on_busy)):
        return None
    if earlier is not None:
        earlier.settle()
    memory = memory_of(talks.memory, call.directory.parent)
    save = Save(talks.pending, memory, call)
    staging = talks.memory.setdefault("staging", Staging())
    steps = run(_staged(save, staging))
    if after is not None:
        steps = _followed(steps, talks.pending, after)
    pending = PendingSave(save, steps, threaded=progress == "thread")
    talks.memory["pending"] = pending
    return pending


class PendingSave:
    """A save whose state was copied; the rest goes on in the background.

    Notes
    -----
    A thread writes the shard by itself. Agreeing and publishing take messages: with
    ``progress="poll"`` they go on whenever `poll` is called, and are over within six
    polls of every rank after the slowest rank has written; `result` waits for all.
    """

    def __init__(self, save: Save, steps: Steps[SaveResult], *, threaded: bool) -> None:
        self.step = save.call.step
        self.path = save.call.directory
        self._steps = steps
        self._result: SaveResult | None = None
        self._failure: BaseException | None = None
        self._is_settled = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._drive, daemon=True)
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not; local, and asks nobody."""
        return self._result is not None or self._failure is not None

    @property
    def has_failed(self) -> bool:
        """Whether the save has ended badly, as far as this rank knows; local."""
        return self._failure is not None

    def poll(self) -> bool:
        """Let the save go on for up to a millisecond; tell whether it has ended.

        Notes
        -----
        Never raises what went wrong: ranks may learn of it at different polls, and
        `result` raises it on all of them. Local.
        """
        if self.done or self._thread is not None:
            return self.done
        end = time.monotonic() + POLL_S
        while not self.done and time.monotonic() < end:
            if not self._go_on():
                break
        return self.done

    def result(self) -> SaveResult:
        """Wait until the save has ended; return its result or raise its error.

        Notes
        -----
        Collective: every rank calls it, and all raise the same. Durable and whole on
        every rank when it returns.
        """
        self._finish()
        self._is_settled = True
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result

    def settle(self) -> None:
        """Wait for the end; raise what went wrong, unless that was raised before."""
        if self._is_settled:
            self._finish()
        else:
            self.result()

    def abandon(self) -> None:
        """Leave the save unpublished: finish local I/O and say no more. Local."""
        self._is_settled = True
        if not self.done and self._thread is None:
            self._steps.close()
            self._failure = CheckpointError("the save was abandoned")

    def _finish(self) -> None:
        if self._thread is not None:
            while self._thread.is_alive():  # so that Ctrl-C gets through
                self._thread.join(0.1)
        elif not self.done:
            self._drive()
        if self._failure is not None and not isinstance(self._failure, Exception):
            raise self._failure

    def _drive(self) -> None:
        if self._thread is not None:
            yield_cpu()
        try:
            self._result = run(self._steps)
        except BaseException as failure:
            self._failure = failure

    def _go_on(self) -> bool:
        """Take one step; tell whether another one may follow at once."""
        try:
            longest_s = next(self._steps)
        except StopIteration as end:
            self._result = end.value
        except BaseException as failure:
            self._failure = failure
        else:
            return longest_s == 0.0
        return False


def _followed(
    steps: Steps[SaveResult], talk: Conversation, after: AfterPublish
) -> Steps[SaveResult]:
    result = yield from steps
    yield from after(talk, result)
    return result


def _may_begin(
    talks: Conversations, earlier: "PendingSave | None", on_busy: OnBusy
) -> Steps[bool]:
    """Tell whether to begin a save; the same answer on every rank."""
    if on_busy == "wait":
        return True
    busy = earlier is not None and not earlier.poll()
    flags = yield from talks.save.allgather(bytes([busy]), "begin")
    if not any(flag[0] for flag in flags):
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

    def write(path: Path, cancelled: threading.Event) -> ShardDigest:
        yield_cpu()
        return write_staged_file(path, staged, save.call.style, cancelled)

    return save.published(drafted, write)


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
