"""Records a scenario, and looks at every disk that the model allows afterwards."""

import contextlib
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from mpickpt.storage.catalog import checkpoints
from mpickpt.storage.job_identity import JobIdentity
from tests.crash.small_state import TIMEOUT_S
from tests.faults.matrix import Verdict
from tests.faults.power_loss_checks import Ending, go_on, load_value, look
from tests.faults.power_loss_processes import in_child
from tests.faults.power_loss_recording import (
    Recorder,
    act_as_rank,
    tree_of,
    write_tree,
)
from tests.faults.power_loss_scenarios import SCENARIOS, Scenario, make_run
from tests.faults.power_loss_states import Recording, State, crash_states
from tests.ranks_as_threads import run_ranks

SIZE = 3
END = "end"
_NOBODY = 2**22 + 1  # above every process id


@cache
def labels_of(name: str) -> tuple[str, ...]:
    """Return the labels of all calls of a scenario, in an order of their own."""
    recording = in_child(record, name, timeout_s=300)
    labels = (op.label for op in recording.operations)
    return tuple(sorted(label for label in labels if "/" in label))


def record(name: str, dies_before: str | None = None) -> Recording:
    """Do a scenario and return what was done.

    With `dies_before` its process is killed there, and the next start saves.
    """
    logging.disable(logging.CRITICAL)
    scenario = SCENARIOS[name]
    with _folder() as root:
        run = root / "run"
        make_run(scenario, run, SIZE)
        recorder = Recorder(root, dies_before=dies_before)
        with recorder.recording():
            if dies_before is None:
                _require_success(_act(scenario, run, recorder))
            else:
                with _as_somebody_dead():
                    _act(scenario, run, recorder)
                assert recorder.is_dead, f"no call {dies_before} was made"
                recorder.revive()
                verdict = go_on(scenario, run, SIZE, age=False)
                assert not verdict.lost, verdict.lost
        return recorder.result


def judge_moments(
    name: str,
    recording: Recording,
    moments: Sequence[tuple[str, int]],
    n_starts: int,
) -> dict[str, tuple[Verdict, int]]:
    """Look at all states of some moments; of each moment start again from a few.

    Returns
    -------
    dict of str
        By the label of the moment: what was wrong, and how many states were new.
    """
    logging.disable(logging.CRITICAL)
    scenario = SCENARIOS[name]
    judged: set[tuple[Any, int]] = set()
    load = _loader()
    answer = {}
    for label, moment in moments:
        stage = recording.stage(moment)
        states = []
        for state in crash_states(recording, moment):
            key = (frozenset(state.items()), stage)
            if key not in judged:
                judged.add(key)
                states.append(state)
        ending = Ending(stage=stage)
        verdicts = [_looked_at(scenario, state, ending, load) for state in states]
        draw = random.Random(moment)
        for state in draw.sample(states, min(n_starts, len(states))):
            verdicts.append(_started_from(scenario, state))
        answer[label] = (worst(verdicts), len(states))
    return answer


def judge_killed(name: str, label: str) -> Verdict:
    """Lose the power after the start that followed a kill: what it saved is there."""
    recording = record(name, label)
    moment = len(recording.operations)
    before, after = SCENARIOS[name].between(recording.stage(moment))
    in_flight = after.keys() - before.keys()  # nobody was told that it is durable
    load = _loader()
    with _folder() as root:
        write_tree(recording.final(), root / "final")
        expected = _published(root / "final" / "run", load)
    found = []
    for state in crash_states(recording, moment):
        with _folder() as root:
            write_tree(state, root / "disk")
            published = _published(root / "disk" / "run", load)
        if _without(published, in_flight) != _without(expected, in_flight):
            text = f"promised are {expected}, after the power loss {published}"
            found.append(Verdict(silent=text))
    return worst(found)


def moments_of(recording: Recording) -> dict[str, int]:
    """Return by label how many operations come before the call, and the end."""
    moments = {
        op.label: index
        for index, op in enumerate(recording.operations)
        if "/" in op.label
    }
    return moments | {END: len(recording.operations)}


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the first complaint of each kind, with how many there are."""
    texts: dict[str, list[str]] = {}
    for verdict in verdicts:
        for column, text in verdict.complaints.items():
            texts.setdefault(column, []).append(text)
    said = {
        column: f"{found[0]} ({len(found)} times)" for column, found in texts.items()
    }
    return Verdict(**said)


def _act(scenario: Scenario, run: Path, recorder: Recorder) -> list[Any]:
    def act(comm: Any) -> None:
        act_as_rank(comm.rank)
        scenario.act(run, comm, recorder.promise)

    if not scenario.is_alone:
        return run_ranks(SIZE, act, TIMEOUT_S)
    try:
        scenario.act(run, None, recorder.promise)
    except BaseException as error:
        return [error]
    return []


def _require_success(outcomes: Sequence[Any]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


@contextlib.contextmanager
def _as_somebody_dead() -> Iterator[None]:
    """Have leases be taken in the name of a process that is gone."""
    real = JobIdentity.current

    def current(environ: Any = None) -> JobIdentity:
        return replace(real(environ), pid=_NOBODY, job="killed")

    JobIdentity.current = current  # type: ignore[method-assign]
    try:
        yield
    finally:
        JobIdentity.current = real  # type: ignore[method-assign]


def _looked_at(
    scenario: Scenario,
    state: State,
    ending: Ending,
    load: Callable[[Path], int | str | None],
) -> Verdict:
    with _folder() as root:
        write_tree(state, root / "disk")
        return look(scenario, root / "disk" / "run", ending, load)


def _started_from(scenario: Scenario, state: State) -> Verdict:
    with _folder() as root:
        write_tree(state, root / "disk")
        return go_on(scenario, root / "disk" / "run", SIZE)


def _published(
    run: Path, load: Callable[[Path], int | str | None]
) -> dict[int, int | str | None]:
    return {entry.step: load(entry.path) for entry in checkpoints(run)}


def _without(published: dict[int, Any], steps: Iterable[int]) -> dict[int, Any]:
    return {step: published[step] for step in published.keys() - set(steps)}


def _loader() -> Callable[[Path], int | str | None]:
    """Return a load that looks at a directory of the same content once only."""
    known: dict[Any, int | str | None] = {}

    def load(path: Path) -> int | str | None:
        key = frozenset(tree_of(path).state().items())
        if key not in known:
            known[key] = load_value(path, SIZE)
        return known[key]

    return load


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="power-loss-", dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
