"""Ranks that die or stop in the midst of a save or a load, one or all, at any step.

Before every system call of a save, each rank in turn (the calls are those of the
errors suite's list); at the steps that are messages, in the process; all ranks at
once. Launchers that spare the survivors show what those raise; for those of Open MPI
the other interpreter of the tests must have it. Then a new start
loads what is there, saves again, and nothing else may lie about.
"""

import json
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults.death_cases import names_in_ci, strikes
from tests.faults.death_strikes import HYDRA, LOADS, OPEN_MPI, SIZE, ULFM, Strike
from tests.faults.death_verdict import (
    complaints_of_next_start,
    complaints_of_survivors,
    complaints_of_victim,
    joined,
)
from tests.faults.matrix import Case, Verdict
from tests.mpi_launch import finish, kill, pythons, start

PROGRAMS = Path(__file__).parent / "programs"
SIDE_BY_SIDE = 2
TEAMS = 4
A_BATCH = 20
START_S = 60.0
FLAGS = {ULFM: ("--with-ft", "ulfm")}

Complaint = tuple[str, str]
Outcome = tuple[str, Verdict]


class Death:
    """The suite."""

    name = "death"

    def why_not(self) -> str | None:
        """Return what this machine lacks for the suite, or None."""
        return None if shutil.which("strace") else "strace is not installed"

    def cases(self) -> Sequence[Case]:
        """Return all cases, always in the same order."""
        short, has_open_mpi = names_in_ci(), len(pythons()) > 1
        return [
            Case(name=name, in_ci=name in short)
            for name, strike in strikes().items()
            if has_open_mpi or strike.launcher not in (ULFM, OPEN_MPI)
        ]

    def run(
        self, cases: Sequence[Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run the cases in jobs and batches, two mpiexecs at a time."""
        by_name = {case.name: case for case in cases}
        for name, verdict in _run([strikes()[name] for name in by_name], folder):
            yield by_name[name], verdict


def _run(chosen: Sequence[Strike], folder: Path) -> Iterator[Outcome]:
    """Kill and stop first, then start again, batch by batch."""
    before: dict[str, list[Complaint]] = {}
    lock = threading.Lock()
    waiting: list[tuple[Strike, Path, dict[int, Any]]] = []
    work: list[Callable[[], list[Outcome]]] = []

    def struck(strike: Strike, own: Path, said: dict[int, Any]) -> list[Outcome]:
        with lock:
            waiting.append((strike, own, said))
            full = waiting[:A_BATCH] if len(waiting) >= A_BATCH else []
            del waiting[: len(full)]
        return start_again(full)

    def start_again(batch: list[tuple[Strike, Path, dict[int, Any]]]) -> list[Outcome]:
        return _next_start(batch, folder, before) if batch else []

    def job(strike: Strike) -> list[Outcome]:
        own = folder / strike.name.replace("/", "-")
        complaints, said = _killed_job(strike, own)
        before[strike.name] = complaints
        return struck(strike, own, said)

    stops = [strike for strike in chosen if strike.kind == "stop"]
    if stops:
        work.append(lambda: _stopped_jobs(stops, folder / "stops", before, struck))
    jobs = [strike for strike in chosen if strike.kind != "stop"]
    # Those that wait for a deadline go well beside those that do not.
    for strike in sorted(jobs, key=lambda strike: strike.launcher == HYDRA):
        work.append(lambda strike=strike: job(strike))  # type: ignore[misc]
    yield from _side_by_side(work)
    for outcomes in _batches(waiting, start_again):
        yield from outcomes


def _batches(waiting: list[Any], start_again: Any) -> Iterator[list[Outcome]]:
    while waiting:
        batch = waiting[:A_BATCH]
        del waiting[:A_BATCH]
        yield start_again(batch)


def _side_by_side(work: Sequence[Callable[[], list[Outcome]]]) -> Iterator[Outcome]:
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    tasks: queue.SimpleQueue[Callable[[], list[Outcome]]] = queue.SimpleQueue()
    for task in work:
        tasks.put(task)

    def take_tasks() -> None:
        try:
            while True:
                done.put(tasks.get_nowait()())
        except queue.Empty:
            done.put(None)
        except BaseException as failure:
            done.put(failure)

    for _ in range(SIDE_BY_SIDE):
        threading.Thread(target=take_tasks, daemon=True).start()
    n_ended = 0
    while n_ended < SIDE_BY_SIDE:
        outcomes = done.get()
        if isinstance(outcomes, BaseException):
            raise outcomes
        if outcomes is None:
            n_ended += 1
        else:
            yield from outcomes


def _killed_job(strike: Strike, own: Path) -> tuple[list[Complaint], dict[int, Any]]:
    """Run one job whose ranks are killed; return complaints, and who said what."""
    python = _python_of(strike.launcher)
    own.mkdir(parents=True)
    (own / "case.json").write_text(json.dumps(strike.as_case()))
    program = "death_unnoticed.py" if strike.launcher == HYDRA else "death_job.py"
    arguments = [str(PROGRAMS / program), str(own)]
    with (own / "output").open("w") as output:
        job = start(
            arguments,
            size=SIZE,
            python=python,
            flags=FLAGS.get(strike.launcher, ()),
            environ={"MPICKPT_TIMEOUT_S": str(strike.timeout_s)},
            output=output,
        )
        try:
            said = _said_by_survivors(strike, own, job)
        finally:
            kill(job)
            job.wait()
    text = (own / "output").read_text()[-2000:]
    if not (own / "armed").exists():
        return [("hung", f"the job ended before anybody was killed: {text}")], {}
    if isinstance(said, str):
        return [("hung", f"{said}: {text}")], {}
    return [], said


def _said_by_survivors(strike: Strike, own: Path, program: Any) -> dict[int, Any] | str:
    """Wait for the reports, or for the end where nobody survives."""
    paths = {rank: own / f"rank{rank}.json" for rank in strike.survivors}
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        has_ended = program.poll() is not None
        if paths and all(path.exists() for path in paths.values()):
            return {rank: json.loads(p.read_text()) for rank, p in paths.items()}
        if (own / f"rank{strike.rank}.json").exists():
            return "nobody was killed"
        if has_ended:
            break
        time.sleep(0.01)
    if not paths and has_ended:
        return {}
    said = [rank for rank, path in paths.items() if path.exists()]
    return f"of ranks {list(paths)}, only {said} said something"


def _python_of(launcher: str) -> str:
    return pythons()[-1] if launcher in (ULFM, OPEN_MPI) else sys.executable


def _stopped_jobs(
    stops: Sequence[Strike],
    folder: Path,
    before: dict[str, list[Complaint]],
    struck: Callable[[Strike, Path, dict[int, Any]], list[Outcome]],
) -> list[Outcome]:
    """Run all stops in one program, teams of ranks side by side."""
    folder.mkdir(parents=True)
    cases = [strike.as_case() for strike in stops]
    (folder / "cases.json").write_text(json.dumps(cases))
    n_teams = min(TEAMS, len(stops))
    arguments = [str(PROGRAMS / "death_stops.py"), str(folder)]
    with (folder / "output").open("w") as output:
        program = start(arguments, size=SIZE * n_teams, output=output)
        longest_s = START_S + 30.0 * (len(stops) // n_teams + 1)
        end = time.monotonic() + longest_s
        while program.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        kill(program)
        program.wait()
    text = (folder / "output").read_text()[-2000:]
    outcomes = []
    for strike in stops:
        path = folder / f"{strike.name.replace('/', '-')}.json"
        if not path.exists():
            outcomes.append((strike.name, Verdict(hung=f"no team did it: {text}")))
            continue
        said = dict(enumerate(json.loads(path.read_text())))
        before[strike.name] = []
        outcomes += struck(strike, path.with_suffix(""), said)
    return outcomes


def _next_start(
    batch: Sequence[tuple[Strike, Path, dict[int, Any]]],
    folder: Path,
    before: dict[str, list[Complaint]],
) -> list[Outcome]:
    """Start again in each of the run directories; judge all that was said."""
    number = len(list(folder.glob("next-*")))
    own = folder / f"next-{number}-{threading.get_native_id()}"
    own.mkdir()
    runs = [
        {"run": str(_run_of(strike, place)), "mode": _mode_of(strike)}
        for strike, place, _ in batch
    ]
    (own / "runs.json").write_text(json.dumps(runs))
    arguments = ["-m", "mpi4py", str(PROGRAMS / "death_next_start.py"), str(own)]
    outcome = finish(start(arguments, size=SIZE), START_S + 5.0 * len(batch))
    found = []
    for place, (strike, _, said) in enumerate(batch):
        complaints = list(before[strike.name])
        path = own / f"{place}.json"
        if not path.exists():
            text = f"the next start ended: {outcome.output[-3000:]}"
            found.append((strike.name, joined([*complaints, ("lost", text)])))
            continue
        told = json.loads(path.read_text())
        steps = told[0]["found"]["steps"]
        if not complaints:
            complaints += complaints_of_survivors(strike, said, steps)
            if strike.kind == "stop":
                complaints += complaints_of_victim(strike, said[strike.rank], steps)
        complaints += complaints_of_next_start(strike, told)
        found.append((strike.name, joined(complaints)))
    return found


def _run_of(strike: Strike, place: Path) -> Path:
    return place if strike.kind == "stop" else place / "run"


def _mode_of(strike: Strike) -> str:
    return "sync" if strike.mode in LOADS else strike.mode


SUITE = Death()
