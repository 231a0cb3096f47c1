"""Every way in which a program or a person reads a run that an enemy wrote.

Each reader gets the run directory, whose newest checkpoint is forged, and returns the
arrays and values that it got, by name, or None.
"""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpickpt
from mpickpt import (
    CheckpointError,
    CheckpointManager,
    PerRank,
    Replicated,
    SaveOptions,
    Sharded,
    load_sharded,
    open_checkpoint,
    read_manifest,
    step_path,
)
from mpickpt.cli.main import main as command_line
from mpickpt.storage.array_reader import StoredArray
from mpickpt.storage.verification import verify_checkpoint
from tests.crash.small_state import flat
from tests.ranks_as_threads import run_ranks

SIZE = 2
OLD, NEW = 1, 2
SECONDS = 300.0
STATUSES = range(6)
MOST_KEYS = 20

Got = dict[str, Any] | None


def state_of(rank: int, step: int = NEW) -> dict[str, Any]:
    """Return what a rank holds at a step."""
    more = 1000 * step
    return {
        "w": Sharded.block(np.arange(12, dtype=np.float32) + 12 * rank + more),
        "box": Sharded(
            np.full((3, 2), rank + step, np.int16),
            global_shape=(3, 4),
            offset=(0, 2 * rank),
        ),
        "same": Replicated(np.arange(5.0) + more),
        "own": PerRank(np.arange(rank + 2) + more),
        "plain": {"lr": 0.5, "big": 2**80, "bytes": b"x", "tuple": (1, None)},
        "names": {"a/b": 1, 7: "seven", "": [1.5, "\ud800"]},
    }


def save_run(run: Path) -> None:
    """Save two checkpoints, and say something about each."""

    def save_rank(comm: Any) -> None:
        for step in (OLD, NEW):
            path = step_path(run, step)
            mpickpt.save_sharded(
                state_of(comm.rank, step),
                path,
                step=step,
                comm=comm,
                metadata={"note": {"by": ["me"]}},
                metrics={"loss": 1.5 / step},
            )

    outcomes = run_ranks(SIZE, save_rank, SECONDS)
    assert outcomes == [None] * SIZE, outcomes


def on_ranks(size: int, read: Callable[[Any], Any]) -> list[Any]:
    """Return what each rank got; raise what all raised alike."""
    outcomes = run_ranks(size, read, SECONDS)
    errors = [one for one in outcomes if isinstance(one, BaseException)]
    if not errors:
        return outcomes
    alike = {(type(error), str(error)) for error in errors}
    if len(errors) < size or len(alike) > 1:
        raise AssertionError(
            f"only some ranks refused, or not alike: {outcomes}"[:2000]
        )
    raise errors[0]


def load_on(size: int, **options: Any) -> Callable[[Path], Got]:
    """Return a collective load of the newest checkpoint."""

    def read(run: Path) -> Got:
        path = step_path(run, NEW)
        trees = on_ranks(size, lambda comm: load_sharded(path, comm=comm, **options))
        return {f"{r}{k}": v for r, t in enumerate(trees) for k, v in flat(t).items()}

    return read


def load_alone(run: Path) -> Got:
    """Load what one rank can have of the state of two."""
    names = ("w", "box", "same", "plain", "names")
    wanted: dict[str, Any] = {name: mpickpt.AsSaved for name in names}
    wanted["own"] = PerRank(None, on_resize="keep")
    return flat(load_sharded(step_path(run, NEW), reshard=True, like=wanted))


def read_opened(run: Path) -> Got:
    """Read all and each in every lazy way."""
    got: dict[str, Any] = {}
    with open_checkpoint(step_path(run, NEW)) as opened:
        listed = [record.key for record in opened.manifest.arrays]
        for key in [*opened.keys()[:MOST_KEYS], *listed[:MOST_KEYS]]:
            assert isinstance(key in opened, bool)
            try:
                value = opened[key]
            except KeyError:
                for rank in range(min(SIZE, opened.manifest.world_size)):
                    got |= _own(opened, key, rank)
                continue
            if isinstance(value, StoredArray):
                repr(value), value.nbytes
                got |= flat(value[...], f"array {key}")
                got |= flat(value[:1] if value.shape else value[()], f"row {key}")
                if value.kind != "per_rank":
                    opened.stored_boxes(key)
                    out = np.empty(value.shape, value.dtype)
                    opened.read_into(key, out)
                    got |= flat(out, f"into {key}")
            else:
                got |= flat(value, f"value {key}")
        got |= flat(opened.load(), "all")
    return got


def _own(opened: Any, key: str, rank: int) -> dict[str, Any]:
    try:
        return flat(opened.per_rank(key)[rank], f"rank {rank} {key}")
    except KeyError:
        return {}


def verify(*, fast: bool) -> Callable[[Path], Got]:
    """Return a verification of the newest checkpoint."""

    def read(run: Path) -> Got:
        report = verify_checkpoint(step_path(run, NEW), fast=fast)
        for failure in report.failures:
            assert isinstance(failure.error, CheckpointError)
            raise failure.error
        return None

    return read


def command(*words: str) -> Callable[[Path], Got]:
    """Return a command of the command line; RUN, CKPT, OLD stand for paths."""

    def read(run: Path) -> Got:
        places = {
            "RUN": str(run),
            "CKPT": str(step_path(run, NEW)),
            "OLD": str(step_path(run, OLD)),
            "OUT": str(run.parent / "exported.npy"),
        }
        status, out, err = run_command([places.get(word, word) for word in words])
        assert status in STATUSES, f"exit status {status}"
        assert "Traceback" not in err, err[-2000:]
        if "--json" in words and out:
            json.loads(out, parse_constant=_refuse_constant)
        bad = [c for c in out if not (c.isprintable() or c == "\n" or _of_path(c))]
        assert not bad or "--json" in words, f"control characters: {bad[:5]}"
        return None

    return read


def run_command(words: list[str]) -> tuple[int, str, str]:
    """Run the command line as a shell would, to streams that encode."""
    before = sys.stdout, sys.stderr
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in before]
    sys.stdout, sys.stderr = streams
    try:
        status = command_line(words)
    except SystemExit as ended:  # argparse's own
        status = int(ended.code or 0)
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.flush()
    texts = [
        stream.buffer.getvalue().decode("utf-8", "surrogateescape")
        for stream in streams
    ]
    return status, texts[0], texts[1]


def _refuse_constant(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


def _of_path(character: str) -> bool:
    return "\udc80" <= character <= "\udcff"


def export_all(run: Path) -> Got:
    """Export every array that the manifest names."""
    for record in read_manifest(step_path(run, NEW)).arrays[:8]:
        rank = ["--rank", "1"] if record.kind == "per_rank" else []
        command("export", "CKPT", record.key, "-o", "OUT", *rank)(run)
    return None


def restore(run: Path) -> Got:
    """Restore the newest checkpoint that is whole, then save; the old one must stay."""
    try:
        on_ranks(SIZE, lambda comm: _restore_and_save(run, comm))
    except CheckpointError:
        # Whatever the new one is: to ask for the old one by its step gives it.
        on_ranks(SIZE, lambda comm: _restore_old(run, comm))
        raise
    return None


def _manager(run: Path, comm: Any, step: int) -> CheckpointManager:
    return CheckpointManager(
        run,
        comm,
        state=lambda: state_of(comm.rank, step),
        asynchronous=False,
        options=SaveOptions(timeout_s=SECONDS),
    )


def _restore_and_save(run: Path, comm: Any) -> None:
    with _manager(run, comm, 5) as manager:
        restored = manager.restore_latest()
        if restored is not None and restored.path.name == step_path(run, OLD).name:
            assert flat(restored.state) == flat(state_of(comm.rank, OLD)), "lost"
        manager.save(manager.next_step)


def _restore_old(run: Path, comm: Any) -> None:
    with _manager(run, comm, 5) as manager:
        restored = manager.restore(OLD)
        assert flat(restored.state) == flat(state_of(comm.rank, OLD)), "lost"


READ_ONLY: dict[str, Callable[[Path], Got]] = {
    "read_manifest": lambda run: {"": read_manifest(step_path(run, NEW)) and None},
    "verify": verify(fast=False),
    "verify --fast": verify(fast=True),
    "load on 2": load_on(2),
    "load on 2, crc32": load_on(2, verify="crc32"),
    "load on 2, none": load_on(2, verify="none"),
    "load on 3": load_on(3, reshard=True, only=["w", "box", "same"]),
    "load alone": load_alone,
    "open": read_opened,
    "show": command("show", "CKPT"),
    "show --json": command("show", "CKPT", "--json"),
    "ls": command("ls", "RUN"),
    "ls --json": command("ls", "RUN", "--json"),
    "mpickpt verify": command("verify", "RUN", "--json"),
    "diff": command("diff", "OLD", "CKPT"),
    "diff --json": command("diff", "CKPT", "OLD", "--json"),
    "export": export_all,
    "prune --dry-run": command(
        "prune", "RUN", "--keep-best", "1:loss", "--dry-run", "--json"
    ),
}
WRITING: dict[str, Callable[[Path], Got]] = {
    "restore_latest": restore,
    "pin": command("pin", "RUN", str(NEW)),
    "set-metric": command("set-metric", "RUN", str(NEW), "loss=3"),
    "halt": command("halt", "RUN", "--clear"),
    "prune": command("prune", "RUN", "--keep-last", "1"),
    "rm": command("rm", "--force", "CKPT"),
}
