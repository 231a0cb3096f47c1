"""Looks at what a power loss left: is it what was promised, and does the run go on?"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpickpt import latest, step_path
from mpickpt.errors import CheckpointError, ManifestError
from mpickpt.format.naming import LEASE_DIRECTORY, document_name
from mpickpt.storage import lease
from mpickpt.storage.catalog import checkpoints, step_directories
from mpickpt.storage.removal import KEPT_REJECTED
from mpickpt.storage.run_directory import RunDirectory
from tests.crash.small_state import (
    TIMEOUT_S,
    files_named_by_manifest,
    files_of,
    flat,
    save,
    state_of,
    try_load,
)
from tests.faults.matrix import Verdict
from tests.faults.power_loss_scenarios import (
    Published,
    Scenario,
    manager_at,
    require_restored,
)
from tests.ranks_as_threads import run_ranks

# The value of the state in a directory; None where all ranks refuse it, a text where
# they disagree or the bytes are not those that were saved.
Load = Callable[[Path], int | str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the ranks fared until the power went.

    Attributes
    ----------
    stage : int
        The last promise that any of them was given before the power went.
    reached : int
        The last one at all, so that what failed is what comes after it.
    failures : tuple of (text, outcome) or None
        What each rank raised, None where it returned.
    wrong_error, hung : str
        What was wrong with that, as of a `Verdict`.
    """

    stage: int
    reached: int = 0
    failures: tuple[tuple[str, str | None] | None, ...] = ()
    wrong_error: str = ""
    hung: str = ""


def load_value(path: Path, size: int) -> int | str | None:
    """Load on all ranks; see `Load`."""
    outcomes = try_load(path, size=size)
    if any(isinstance(outcome, BaseException) for outcome in outcomes):
        return _refusal(outcomes)
    value = outcomes[0]["step"]
    for rank, outcome in enumerate(outcomes):
        if flat(outcome) != flat(state_of(rank, value)):
            return f"rank {rank} loads other bytes than it saved as {value}"
    return int(value)


def _refusal(outcomes: list[Any]) -> str | None:
    said = {(type(outcome), str(outcome)) for outcome in outcomes}
    if len(said) > 1 or not isinstance(outcomes[0], CheckpointError):
        return f"ranks loading do not agree: {sorted(map(str, said))}"
    return None


def look(scenario: Scenario, run: Path, ending: Ending, load: Load) -> Verdict:
    """Compare what is published in a run with what must be and may be."""
    before, after = scenario.between(ending.stage)
    published = {entry.step: entry.path for entry in checkpoints(run)}
    wrong = [
        *_wrong_values(
            published, (before, after, scenario.leftovers(ending.stage)), load
        ),
        *_wrong_failures(published, scenario, ending, load),
    ]
    lost = [
        f"step {step} is not there"
        for step in before.keys() & after.keys() - published.keys()
    ]
    gone = before.keys() - after.keys() - published.keys()
    if gone and not (after.keys() - before.keys()) <= published.keys():
        lost.append(f"{sorted(gone)} went before the new one was durable")
    for step in gone if scenario.sets_aside else ():
        lost += _wrong_rejected(run, step, before[step], load)
    newest = latest(run)
    if newest != (step_path(run, max(published)) if published else None):
        wrong.append(f"latest says {newest}, published are {sorted(published)}")
    try:
        scenario.check(run, ending.stage)
    except AssertionError as error:
        wrong.append(str(error))
    return Verdict(lost="; ".join(lost), silent="; ".join(wrong))


def _wrong_values(
    published: dict[int, Path], versions: Sequence[Published], load: Load
) -> list[str]:
    wrong = []
    for step, path in published.items():
        allowed = {version[step] for version in versions if step in version}
        if not allowed:
            wrong.append(f"step {step} is published, which was removed or never saved")
            continue
        value = load(path)
        if value not in allowed:
            wrong.append(
                f"step {step} is published, but what loads is {value!r}, not one of "
                f"{allowed}"
            )
    return wrong


def _wrong_failures(
    published: dict[int, Path], scenario: Scenario, ending: Ending, load: Load
) -> list[str]:
    """Tell where a save that failed, and said it is unpublished, is there."""
    before, after = scenario.between(ending.reached)
    outcomes = {failure[1] for failure in ending.failures if failure is not None}
    if not outcomes or "unknown" in outcomes:
        return []
    new = {step for step in after if after[step] != before.get(step, -1)}
    there = [s for s in new & published.keys() if load(published[s]) == after[s]]
    return [f"the save of {there} failed, but is there"] if there else []


def _wrong_rejected(run: Path, step: int, value: int | None, load: Load) -> list[str]:
    rejected = [entry for entry in RunDirectory(run).rejected() if entry.step == step]
    if [load(entry.path) for entry in rejected] == [value]:
        return []
    return [f"step {step} is neither published nor set aside: {rejected}"]


def go_on(scenario: Scenario, run: Path, size: int, *, age: bool = True) -> Verdict:
    """Start again as the program would: restore, save; look at what lies around."""
    if scenario.again == "save":
        return _save_again(scenario, run, size)
    if age:
        _let_time_pass(run)
    said: list[str] = []
    found = latest(run)

    def start(comm: Any) -> None:
        manager, set_value = manager_at(run, comm, 0)
        with manager:
            restored = manager.restore_latest()
            if restored is not None:
                require_restored(restored, comm.rank)
                assert found is not None
                if restored.path != found and not restored.rejected:
                    said.append(f"restored {restored.path}, latest was {found}")
            step = manager.next_step + 20
            set_value(step)
            manager.save(step, wait=True)

    with _short_watch():
        outcomes = run_ranks(size, start, TIMEOUT_S)
    verdict = _start_failed(outcomes)
    if verdict.complaints or said:
        return Verdict(lost=verdict.lost or "; ".join(said), hung=verdict.hung)
    return Verdict(rubbish=_strangers_in_run(run))


@contextlib.contextmanager
def _short_watch() -> Iterator[None]:
    """Take over at once from the holder of a torn lease, who is dead."""
    beats, lease.BEATS = lease.BEATS, 0
    try:
        yield
    finally:
        lease.BEATS = beats


def _let_time_pass(run: Path) -> None:
    """Make all files an hour older: the machine was off."""
    for name in files_of(run):
        before = (run / name).stat().st_mtime - 3600
        os.utime(run / name, (before, before))


def _save_again(scenario: Scenario, run: Path, size: int) -> Verdict:
    step = max(scenario.stages[-1])
    path = step_path(run, step)
    is_published = any(entry.step == step for entry in checkpoints(run))
    try:
        save(path, step=99, size=size, overwrite=is_published)
    except BaseException as error:
        return _start_failed([error])
    value = load_value(path, size)
    if value != 99:
        return Verdict(lost=f"after the next save, {value} loads")
    strangers = files_of(path) ^ files_named_by_manifest(path)
    return Verdict(rubbish=_text("left in or missing from the checkpoint", strangers))


def _start_failed(outcomes: list[Any]) -> Verdict:
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    text = "; ".join(f"{type(failure).__name__}: {failure}" for failure in failures[:1])
    if any(isinstance(failure, TimeoutError) for failure in failures):
        return Verdict(hung=f"the next start: {text}")
    return Verdict(lost=f"the next start: {text}" if text else "")


def _strangers_in_run(run: Path) -> str:
    """Name the files of a run that nothing accounts for."""
    known: set[str] = set()
    optional: set[str] = set()
    directory = RunDirectory(run)
    rejected = directory.rejected()
    for entry in [*checkpoints(run), *rejected]:
        name = entry.path.name
        known |= {f"{name}/{file}" for file in _named(entry.path)}
        optional |= {f".mpickpt/metrics/{document_name(name)}", f".mpickpt/pins/{name}"}
    optional |= {f".mpickpt/rejected/{document_name(e.path.name)}" for e in rejected}
    optional |= {".mpickpt/metrics/lock", ".mpickpt/halt"}
    leases = {f for f in files_of(run) if f.startswith(f"{LEASE_DIRECTORY}/")}
    found = files_of(run)
    strangers = found - known - optional - set(sorted(leases)[-1:])
    strangers |= {f"{e.path.name}/" for e in _unpublished(run)}
    if len([entry for entry in rejected if not entry.is_pinned]) > KEPT_REJECTED:
        strangers.add("rejected checkpoints beyond those kept")
    return _text("nothing accounts for", strangers)


def _named(path: Path) -> set[str]:
    try:
        return files_named_by_manifest(path)
    except ManifestError:
        return files_of(path)  # set aside whole, with its manifest damaged


def _unpublished(run: Path) -> list[Any]:
    return [
        found
        for found in step_directories(run)
        if not found.is_published and not found.is_rejected
    ]


def _text(what: str, names: set[str]) -> str:
    return f"{what}: {', '.join(sorted(names))}" if names else ""
