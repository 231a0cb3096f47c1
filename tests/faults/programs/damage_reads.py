"""MPI program: damages copies of a run one way after the other, and reads each.

Rank 0 writes a line of JSON for each case: what was wrong with it, by column. Where a
column is about ranks, all of them were asked.
"""

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpickpt import (
    CheckpointError,
    CheckpointManager,
    SaveOptions,
    Sharded,
    load_sharded,
    open_checkpoint,
    step_path,
)
from mpickpt.storage.verification import verify_checkpoint
from tests.crash.small_state import flat, state_of
from tests.faults.damage_cases import NEW, OLD, ROWS, SIZE, Damage, damages

TIMEOUT_S = 30.0
SLOW_S = 45.0
HANGING_S = 120.0  # then this program ends itself, and its suite goes on behind it
READ_BYTES = "right bytes"
WRONG_BYTES = "wrong bytes"

Said = dict[str, Any]

comm = MPI.COMM_WORLD


def drop_privileges() -> None:
    """Let file permissions count for root too, in this thread and all later ones."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    sets = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, sets) == 0:
        override_and_search = 1 << 1 | 1 << 2
        sets[0] &= ~override_and_search
        libc.capset(header, sets)


def require_equal(got: Any, step: int, rank: int) -> None:
    """Raise ValueError unless a rank got the bytes of a step."""
    if flat(got) != flat(state_of(rank, step, ROWS)):
        raise ValueError(f"rank {rank}: other than at step {step}")


def load(path: Path, verify: str) -> None:
    """Load on as many ranks as saved."""
    got = load_sharded(path, comm=comm, verify=verify, timeout_s=TIMEOUT_S)
    require_equal(got, NEW, comm.rank)


def reshard(path: Path) -> None:
    """Load some arrays on three ranks."""
    if three == MPI.COMM_NULL:
        return
    keys = ["model/*", "scale"]
    got = load_sharded(path, comm=three, reshard=True, only=keys, timeout_s=TIMEOUT_S)
    for key, array in got["model"].items():
        whole = whole_array(key)
        assert isinstance(array, Sharded)
        rows = slice(array.offset[0], array.offset[0] + len(array.data))
        if array.data.tobytes() != whole[rows].tobytes() or not len(array.data):
            raise ValueError(f"rank {three.rank}: other rows {rows} of {key}")
    if flat(got["scale"]) != flat(state_of(0, NEW, ROWS)["scale"]):
        raise ValueError(f"rank {three.rank}: another scale")


def whole_array(key: str) -> np.ndarray:
    """Return an array of the model in one piece."""
    states = [state_of(rank, NEW, ROWS) for rank in range(SIZE)]
    return np.concatenate([state["model"][key].data for state in states])


def read_opened(path: Path) -> None:
    """Read all, and a slice over two shards, on one process."""
    with open_checkpoint(path) as opened:
        rows = opened["model", "w"][ROWS - 2 : ROWS + 3]
        state = opened.load()
        own = [opened.per_rank("own")[rank] for rank in range(SIZE)]
    w = whole_array("w")
    if rows.tobytes() != w[ROWS - 2 : ROWS + 3].tobytes():
        raise ValueError("other rows")
    for rank in range(SIZE):
        lowest = ROWS * rank
        half = state["model"]["half"][37 * rank : 37 * rank + 37]
        held = state_of(rank, NEW, ROWS)
        held["model"] = {"w": w[lowest : lowest + ROWS], "half": half}
        held |= {"scale": state["scale"], "own": own[rank]}
        require_equal(held, NEW, rank)


def verify(path: Path, *, fast: bool) -> None:
    """Verify on one process; raise what is wrong with the first file."""
    report = verify_checkpoint(path, fast=fast)
    for failure in report.failures:
        assert failure.error is not None
        blamed.add(str(path / failure.path))
    if report.failures:
        raise report.failures[0].error


def restore(path: Path) -> None:
    """Restore the newest checkpoint that is whole, and save again."""
    run = path.parent
    expected = restored_step(damage)
    with manager(run) as runner:
        restored = runner.restore_latest()
        if restored is None:
            raise LookupError("nothing was restored")
        require_equal(restored.state, restored.step, comm.rank)
        if restored.step != expected:
            raise LookupError(f"step {restored.step}, not {expected}")
        if expected == OLD:
            held.update(step=NEW)
            runner.save(NEW)
    if expected == NEW:
        return
    load(path, "sha256")
    left = {name for name in os.listdir(run) if name.startswith("step-")}
    aside = {name for name in left if ".rejected-" in name}
    named = {step_path(run, step).name for step in (OLD, NEW)}
    was_published = (damage.expected or ("",))[0] != "CheckpointNotFoundError"
    if left - aside != named or len(aside) != was_published:
        raise FileExistsError(f"left lying: {sorted(left)}")


def manager(run: Path) -> CheckpointManager:
    """Return a manager whose state is that of `held`."""
    held.update(step=0)
    return CheckpointManager(
        run,
        comm,
        state=lambda: state_of(comm.rank, held["step"], ROWS),
        asynchronous=False,
        options=SaveOptions(timeout_s=TIMEOUT_S),
    )


def restored_step(damage: Damage) -> int:
    """Return the step that a restart must go on from."""
    is_unseen = not damage.expected or "load sha256" in damage.spares
    return NEW if is_unseen else OLD


COLLECTIVE: dict[str, Callable[[Path], None]] = {
    "load sha256": lambda path: load(path, "sha256"),
    "load crc32": lambda path: load(path, "crc32"),
    "reshard": reshard,
    "restore_latest": restore,
}
ALONE: dict[str, Callable[[Path], None]] = {
    "open": read_opened,
    "verify": lambda path: verify(path, fast=False),
    "verify --fast": lambda path: verify(path, fast=True),
}


def attempt(read: Callable[[Path], None], path: Path) -> Said:
    """Return how one rank fared."""
    begin = time.monotonic()
    said: Said = {"class": READ_BYTES, "text": ""}
    try:
        read(path)
    except CheckpointError as error:
        said = {
            "class": type(error).__name__,
            "text": str(error),
            "path": getattr(error, "path", None),
            "errno": getattr(error, "errno", None),
            "rank": error.rank,
            "host": error.host,
        }
    except ValueError as error:
        said = {"class": WRONG_BYTES, "text": str(error)}
    except (LookupError, FileExistsError) as error:
        said = {"class": type(error).__name__, "text": str(error)}
    except Exception as error:
        said = {"class": f"foreign {type(error).__name__}", "text": repr(error)[:500]}
    return said | {"seconds": time.monotonic() - begin}


def judged(reader: str, said: list[Said]) -> dict[str, str]:
    """Return the complaints about one case, by column."""
    slowest = max(one["seconds"] for one in said)
    slow = {"hung": f"{slowest:.0f} s"} if slowest > SLOW_S else {}
    column, text = complaint(reader, said)
    return slow | ({column: text} if text else {})


def complaint(reader: str, said: list[Said]) -> tuple[str, str]:
    """Return what is wrong with what the ranks said, and the column; "" if nothing."""
    classes = {one["class"] for one in said}
    told = f"{classes}: {said[0]['text'][:300]}"
    if WRONG_BYTES in classes:
        wrong = [one["text"] for one in said if one["class"] == WRONG_BYTES]
        return "silent", str(wrong)
    if "FileExistsError" in classes:
        return "rubbish", told
    if reader == "restore_latest" and damage.falls_back:
        return "lost", "" if classes == {READ_BYTES} else told
    if len(texts := {(one["class"], one["text"]) for one in said}) != 1:
        return "wrong_error", f"ranks differ: {sorted(texts)}"[:1000]
    if classes == {READ_BYTES}:
        is_passed_over = damage.expected and reader not in damage.spares
        return "silent", "read as if it were whole" if is_passed_over else ""
    if not classes <= set(damage.expected):
        return "wrong_error", f"expected {damage.expected}, got {told}"
    return "wrong_error", complaint_about(said[0], collective=reader in COLLECTIVE)


def complaint_about(one: Said, *, collective: bool) -> str:
    """Return what an error does not tell."""
    if not any(str(path) in one["text"] for path in blamed_now):
        return f"names none of {sorted(blamed_now)}: {one['text'][:300]}"
    if collective and (one["rank"] is None or not one["host"]):
        return f"names no rank or no host: {one['text'][:300]}"
    has_path = one["class"] not in ("ManifestError", "CheckpointNotFoundError")
    if has_path and one["path"] not in map(str, blamed_now):
        return f"path is {one['path']}, not one of {sorted(blamed_now)}"
    if one["class"] == "StorageError" and not one["errno"]:
        return f"errno is {one['errno']}"
    return ""


def prepare(library: Path, work: Path) -> Path:
    """Return a damaged copy of the newest checkpoint, and note who may be blamed."""
    paths: list[str] | str = []
    path = step_path(work / "run", NEW)
    if comm.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        shutil.copytree(library / "run", work / "run")
        try:
            paths = [str(blamed) for blamed in damage.do(library, path)]
        except Exception as error:
            paths = repr(error)
    told = comm.bcast(paths)
    assert not isinstance(told, str), f"{damage.name}: {told}"
    # What no reader can open is told apart by its directory alone.
    blamed_now.clear()
    blamed_now.update(told)
    if (damage.expected or ("",))[0] == "CheckpointNotFoundError":
        blamed_now.add(str(path))
    return path


def main() -> None:
    global damage
    library, work, results, chosen = map(Path, sys.argv[1:])
    wanted: dict[str, list[str]] = json.loads(chosen.read_text())
    out = results.open("w") if comm.rank == 0 else contextlib.nullcontext()
    with out as file:
        for number, damage in enumerate(d for d in damages() if d.name in wanted):
            readers = wanted[damage.name]
            path = prepare(library, work)
            for reader in sorted(readers, key="restore_latest".__eq__):
                said = said_by_all(reader, path, number)
                if file is not None:
                    verdict = judged(reader, said)
                    line = json.dumps([f"{damage.name}/{reader}", verdict])
                    file.write(line + "\n")
                    file.flush()
            gc.collect()


def said_by_all(reader: str, path: Path, number: int) -> list[Said]:
    """Return how every rank that took part fared."""
    faulthandler.dump_traceback_later(HANGING_S, exit=True)
    blamed.clear()
    if reader in COLLECTIVE:
        said = comm.allgather(attempt(COLLECTIVE[reader], path))
        return said[:3] if reader == "reshard" else said
    reading_rank = number % SIZE
    own = attempt(ALONE[reader], path) if comm.rank == reading_rank else None
    one, others = comm.bcast((own, blamed), reading_rank)
    if not others <= blamed_now:
        one |= {"class": "foreign verdict", "text": f"also {others - blamed_now}"}
    return [one]


damage: Damage
blamed: set[str] = set()
blamed_now: set[str] = set()
held: dict[str, int] = {"step": 0}
drop_privileges()
three = comm.Split(0 if comm.rank < 3 else MPI.UNDEFINED)

main()
