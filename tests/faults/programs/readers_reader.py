"""One reader: looks at a run over and over while a job writes in it.

``readers_reader.py RUN JOURNAL READER SECONDS REPORT``. What it saw is compared with
the writer's journal; the report lists what cannot have been.
"""

import contextlib
import io
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpickpt
from mpickpt import CheckpointManager, CheckpointNotFoundError, load_sharded
from mpickpt.cli.main import main as command
from mpickpt.storage.catalog import latest
from tests.faults.readers_journal import JournalReader, Span
from tests.faults.soak_state import PureState, global_problem

RUN, JOURNAL = Path(sys.argv[1]), Path(sys.argv[2])
READER, SECONDS, REPORT = sys.argv[3], float(sys.argv[4]), Path(sys.argv[5])
MOST_COMPLAINTS = 5
NOT_FOUND = 4
FEWEST_READS, PATIENCE_S = 5, 60.0
HESITATES, LONGEST_PAUSE_S = 0.1, 0.05

journal = JournalReader(JOURNAL)
complaints: dict[str, list[str]] = {"silent": [], "wrong_error": [], "lost": []}
counts = {"reads": 0, "not_found": 0}


def complain(column: str, text: str) -> None:
    if len(complaints[column]) < MOST_COMPLAINTS:
        complaints[column].append(f"read {counts['reads']}: {text}")


def hesitate_and_forbid_changes() -> None:
    """Be slow between two looks at the run; complain when anything in it is changed."""
    dice = random.Random(READER)
    changing = {"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate"}
    # An evaluator may count its restores where nobody writes; never touch a step.
    run = os.path.abspath(RUN)
    forbidden = f"{run}/step-" if READER == "evaluator" else run

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in changing or writes:
            path = arguments[0]
            if isinstance(path, str | bytes | os.PathLike):
                name = os.path.abspath(os.fsdecode(path))
                if name.startswith(forbidden):
                    complain("lost", f"a reader does {event} of {name}")
            return
        looks = event in ("open", "os.listdir") and str(arguments[0]).startswith(run)
        if looks and dice.random() < HESITATES:
            time.sleep(dice.uniform(0, LONGEST_PAUSE_S))

    sys.addaudithook(watch)


class Look:
    """One reading, and what was there meanwhile."""

    def __init__(self) -> None:
        self._span = Span(time.monotonic())

    def ends(self) -> None:
        self._span.end_s = time.monotonic()
        journal.look()

    @property
    def versions(self) -> set[tuple[str, int]]:
        """Directories and versions that can have been there."""
        return journal.may_be_seen(self._span)

    @property
    def possible(self) -> set[str]:
        """Directories that can have held a checkpoint."""
        return {directory for directory, _ in self.versions}

    @property
    def certain(self) -> set[str]:
        """Directories that held a checkpoint all the time."""
        return journal.must_be_seen(self._span)


def run_command(*words: str) -> tuple[int, str, str]:
    """Run the command line in this process; return status, output and complaints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = command(words)
    return status, out.getvalue(), err.getvalue()


def require_status(look: Look, status: int, err: str, directory: str | None) -> bool:
    """Tell whether a command gave an answer; complain if it had to and did not."""
    if status == 0:
        return True
    counts["not_found"] += 1
    there = look.certain if directory is None else look.certain & {directory}
    if status != NOT_FOUND or there:
        complain("wrong_error", f"status {status}: {err}")
    return False


def ls() -> None:
    look = Look()
    status, out, err = run_command("ls", "--json", str(RUN))
    look.ends()
    require_status(look, status, err, None)
    listed = {Path(entry["path"]).name: entry for entry in json.loads(out)}
    for name, entry in listed.items():
        if entry["state"] == "whole" and name not in look.possible:
            complain("silent", f"{name} is listed as whole, which it was not")
        if entry["state"] == "damaged":
            complain("silent", f"{name} is listed as damaged: {entry['problem']}")
    for name in look.certain:
        if listed.get(name, {}).get("state") != "whole":
            complain("silent", f"{name} is whole and not listed so: {listed.get(name)}")


def verify() -> None:
    look = Look()
    options = ["--fast"] if counts["reads"] % 2 else []
    status, out, err = run_command("verify", "--json", *options, str(RUN))
    look.ends()
    if not require_status(look, status, err + out, None):
        return
    for verdict in json.loads(out):
        name = Path(verdict["path"]).name
        if verdict["problem"] is None and name not in look.possible:
            complain("silent", f"{name} is verified, though it was not there")


def newest() -> Path | None:
    """Return the newest checkpoint, and complain if it cannot be it."""
    look = Look()
    status, out, err = run_command("latest", str(RUN))
    look.ends()
    if not require_status(look, status, err, None):
        return None
    path = Path(out.strip())
    if path.name not in look.possible:
        complain("silent", f"{path.name} is the latest, though it was not there")
    newer = [name for name in look.certain if name > path.name]
    if newer:
        complain("silent", f"{path.name} is the latest, though {newer[0]} was there")
    return path


def show() -> None:
    path = newest()
    if path is None:
        return
    look = Look()
    status, out, err = run_command("show", "--json", str(path))
    look.ends()
    if require_status(look, status, err, path.name):
        shown = json.loads(out)
        version = shown["metadata"].get("version", shown["step"])
        if (path.name, version) not in look.versions or shown["world_size"] != 4:
            complain("silent", f"{path.name} shows {version}")


def read(call: Callable[[Path], tuple[int, str]]) -> None:
    """Read the newest checkpoint; compare the bytes with what was saved."""
    path = latest(RUN)
    if path is None:
        return
    look = Look()
    try:
        step, problem = call(path)
    except CheckpointNotFoundError as error:
        look.ends()
        counts["not_found"] += 1
        if path.name in look.certain:
            complain("wrong_error", f"{path.name} was there: {error}")
        return
    look.ends()
    if problem:
        complain("silent", f"{path.name}: {problem}")
    if (path.name, step) not in look.versions:
        complain("silent", f"{path.name} gave step {step}, which it did not hold")


def load_open(path: Path) -> tuple[int, str]:
    with mpickpt.open_checkpoint(path) as checkpoint:
        loaded = checkpoint.load()
        world_size = checkpoint.manifest.world_size
    return loaded["step"], global_problem(loaded, world_size)


def load_like(path: Path) -> tuple[int, str]:
    state = PureState()
    verify = ("sha256", "crc32")[counts["reads"] % 2]
    loaded = load_sharded(path, like=state.tree(), reshard=True, verify=verify)
    return loaded["step"], state.problem(loaded, loaded["step"], 4)


def evaluate() -> None:
    """Restore the newest, as a program that only evaluates."""
    state, look = PureState(), Look()
    with CheckpointManager(RUN, None, state=state.tree) as manager:
        restored = manager.restore_latest(reshard=True)
    look.ends()
    if restored is None:
        if look.certain:
            complain("silent", f"nothing restored, with {look.certain}")
        return
    if restored.rejected:
        complain("silent", f"passed over {restored.rejected}")
    manifest = restored.manifest
    version = manifest.metadata.get("version", manifest.step)
    problem = state.problem(restored.state, version, 4)
    if problem:
        complain("silent", problem)
    if (restored.path.name, version) not in look.versions:
        complain("silent", f"restored {restored.path.name}, which was not there")


READERS: dict[str, Callable[[], object]] = {
    "ls": ls,
    "verify": verify,
    "show": show,
    "latest": newest,
    "open": lambda: read(load_open),
    "load": lambda: read(load_like),
    "evaluator": evaluate,
}


def main() -> None:
    hesitate_and_forbid_changes()
    end_s = time.monotonic() + SECONDS
    for counts["reads"] in itertools.count(1):
        try:
            READERS[READER]()
        except Exception as error:
            complain("wrong_error", f"{type(error).__name__}: {error}")
        is_slow = counts["reads"] < FEWEST_READS
        if time.monotonic() > end_s + is_slow * PATIENCE_S:
            break
    REPORT.write_text(json.dumps({"complaints": complaints, **counts}))


main()
