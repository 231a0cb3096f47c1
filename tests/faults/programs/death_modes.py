"""What the jobs of the death suite do, and the moments at which a rank is struck.

The modes of saving are those of the errors suite; a training and two loads are added.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpickpt import CollectiveTimeoutError, Replicated, SaveOptions, Sharded
from mpickpt import load_sharded as load_collectively
from mpickpt.parallel import (
    describe,
    fetch,
    ground,
    load,
    pending,
    retention,
    run_saver,
    save_steps,
    watch,
)
from mpickpt.parallel.fetch import Fetch
from mpickpt.parallel.redistribute import Redistribution
from mpickpt.storage import shard_file, staging
from mpickpt.storage.catalog import step_path
from tests.crash.small_state import flat, state_of
from tests.faults.programs import errors_modes
from tests.faults.programs.errors_modes import ROWS, AtOnce, Managed

Said = dict[str, Any]
Strike = Callable[[], None]

BEFORE, SECOND, AFTER = "before", "second", "after"

# Where each is: what is called, and when in that call it strikes.
MOMENTS: dict[str, tuple[Any, str, str]] = {
    "lease": (run_saver.RunSaver, "save", BEFORE),
    "begin": (pending, "_may_begin", BEFORE),
    "describe": (save_steps.Save, "describe", BEFORE),
    "layout": (describe, "resolve", BEFORE),
    "prepare": (save_steps.Save, "prepare", BEFORE),
    "make-room": (ground, "make_room", BEFORE),
    "draft": (save_steps.Save, "draft", BEFORE),
    "stage": (staging.Staging, "hold", BEFORE),
    "write": (save_steps.Save, "write", BEFORE),
    "amid-write": (shard_file.ShardFile, "write_at", SECOND),
    "agree": (save_steps.Save, "agree", BEFORE),
    "publish": (save_steps.Save, "publish", BEFORE),
    "manifest": (ground, "publish_checkpoint", BEFORE),
    "published": (ground, "publish_checkpoint", AFTER),
    "answer": (save_steps.Save, "result", BEFORE),
    "retention": (retention.Retention, "apply", BEFORE),
    "unpublish": (retention, "unpublish", BEFORE),
    "remove-files": (retention, "_remove", BEFORE),
    "step": (watch.Watch, "decide", SECOND),
    "arguments": (load.Load, "agree_on_call", BEFORE),
    "read-manifest": (load.Load, "receive_manifest", BEFORE),
    "read-indexes": (load.Load, "read_indexes", BEFORE),
    "match": (load.Load, "match", BEFORE),
    "read": (Fetch, "steps", BEFORE),
    "amid-read": (Fetch, "read", BEFORE),
    "move": (Redistribution, "around", BEFORE),
    "compare": (fetch, "require_equal", BEFORE),
}


def strike_at(moment: str, strike: Strike) -> None:
    """Have this process struck once, when it comes to a moment."""
    owner, name, when = MOMENTS[moment]
    call = getattr(owner, name)
    n_calls = 0

    def struck(*arguments: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if when != SECOND or n_calls == 2:
            setattr(owner, name, call)
            if when != AFTER:
                strike()
            else:
                try:
                    return call(*arguments, **options)
                finally:
                    strike()
        return call(*arguments, **options)

    setattr(owner, name, struck)


def before(owner: Any, name: str, first: Strike) -> None:
    """Have something done before each call of a function."""
    call = getattr(owner, name)

    def preceded(*arguments: Any, **options: Any) -> Any:
        first()
        return call(*arguments, **options)

    setattr(owner, name, preceded)


class Training(Managed):
    """A manager whose save goes on behind the steps of a training."""

    def save(self) -> None:
        self.step = 3
        self.manager.save(3)
        for step in range(4, 14):
            self.manager.save_if_due(step)
            time.sleep(2e-3)
        self.manager.wait()


class Loading(AtOnce):
    """`load_sharded`, every rank what it saved."""

    name = "load"
    new = old = (1, 1)

    def save(self) -> None:
        comm = errors_modes.COMM
        timeout_s = errors_modes.OPTIONS.timeout_s
        tree = load_collectively(step_path(self.run, 1), comm=comm, timeout_s=timeout_s)
        assert flat(tree) == flat(state_of(comm.rank, 1, ROWS)), "other bytes"

    def again(self) -> None:
        self.save()


class Resharding(Loading):
    """`load_sharded`, every rank the rows of another."""

    name = "reshard"

    def save(self) -> None:
        comm = errors_modes.COMM
        source = comm.size - 1 - comm.rank
        rows = np.zeros((ROWS, 4), np.float32)
        like = {
            "model": {"w": Sharded(rows, (comm.size * ROWS, 4), (source * ROWS, 0))},
            "scale": Replicated(np.zeros(777)),
        }
        load_collectively(
            step_path(self.run, 1),
            comm=comm,
            like=like,
            reshard=True,
            unexpected="ignore",
            timeout_s=errors_modes.OPTIONS.timeout_s,
        )
        wanted = state_of(source, 1, ROWS)
        assert rows.tobytes() == wanted["model"]["w"].data.tobytes(), "other bytes"
        assert flat(like["scale"]) == flat(wanted["scale"]), "other bytes"


def mode_named(name: str) -> AtOnce:
    """Return a new mode."""
    made = [*errors_modes.MODES, Training("training", wait=False)]
    made += [Loading(), Resharding()]
    return next(mode for mode in made if mode.name == name)


def use(comm: Any, timeout_s: float) -> None:
    """Have the modes use a communicator and a deadline from now on."""
    errors_modes.COMM = comm
    errors_modes.OPTIONS = SaveOptions(block_nbytes=16 << 10, timeout_s=timeout_s)


def told(call: Callable[..., Any], *arguments: Any) -> Said:
    """Call, and tell what came of it."""
    begin, said = time.monotonic(), {"class": None}
    try:
        call(*arguments)
    except BaseException as error:
        names = ("phase", "missing_ranks", "outcome")
        said = {name: getattr(error, name, None) for name in names}
        said |= {"class": type(error).__name__, "text": str(error)[:800]}
    return said | {"seconds": time.monotonic() - begin, "ended": time.monotonic()}


def tell(mode: AtOnce) -> Said:
    """Save, or load, and once more; tell what came of both."""
    first = told(mode.save)
    later = told(mode.again) if first["class"] is not None else None
    return {"first": first, "later": later}


def leave(mode: AtOnce) -> None:
    """End a mode as a program does that an exception ends."""
    if isinstance(mode, Managed):
        error = CollectiveTimeoutError("the program ends")
        with contextlib.suppress(CollectiveTimeoutError):
            mode.manager.__exit__(type(error), error, None)


def meet(comm: Any) -> None:
    """Wait for all ranks of a communicator, asleep."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(5e-3)


def new_copy(mode: AtOnce, template: Path, run: Path, comm: Any) -> None:
    """Make the run directory of a case: a copy of the mode's template."""
    import shutil

    if comm.rank == 0:
        shutil.copytree(template, run, symlinks=True)
    meet(comm)
