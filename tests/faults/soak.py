"""A soak: a run that saves, prunes and goes back, killed over and over; and flat use.

``kills/NN`` is a stretch of one run: several starts under mpiexec, each ended by a
kill, a signal or an exception some cycles on. ``steady/MODE`` is one start of hundreds
of cycles, in which memory, descriptors, threads and communicators must stay flat.
"""

import json
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path

from mpickpt import CheckpointError, checkpoints, open_checkpoint
from mpickpt.storage.removal import KEPT_REJECTED
from mpickpt.storage.verification import verify_checkpoint
from tests.faults.matrix import Case, Verdict
from tests.faults.soak_plan import Start, starts_of
from tests.faults.soak_state import global_problem
from tests.mpi_launch import Outcome, finish, kill, start

RUN_PROGRAM = "tests/faults/programs/soak_run.py"
STEADY_PROGRAM = "tests/faults/programs/soak_steady.py"
N_STRETCHES, N_STARTS = 12, 6
STEADY = ("async", "poll", "sync", "failing", "restoring", "reopening")
IN_CI = ("kills/00", "kills/01", "steady/failing")
N_RANKS = 4
N_CYCLES, WARM_UP = 400, 150
TIMEOUT_S = 400.0
SIDE_BY_SIDE = 2
REQUEUE = 85

# What MPI and the C library keep by themselves is not looked for here. UCX, which is in
# the wheel of MPICH, notes each unmapping until the next large message: 300 bytes for a
# thread that comes and goes. glibc gives threads arenas, each as large as it ever was.
WITHOUT_FOREIGN_GROWTH = {"UCX_MEM_EVENTS": "n", "MALLOC_ARENA_MAX": "1"}
MOST_ALLOCATED_A_CYCLE = 768
MOST_RESIDENT = 4 << 20  # from the warm-up to the end; Python grows by 1 MiB at a time
MOST_REJECTED = KEPT_REJECTED + 1


class Soak:
    """Long runs."""

    name = "soak"

    def why_not(self) -> str | None:
        """Return None: nothing special is needed."""

    def cases(self) -> Sequence[Case]:
        """Return the stretches."""
        names = [f"kills/{number:02d}" for number in range(N_STRETCHES)]
        names += [f"steady/{mode}" for mode in STEADY]
        return [Case(name=name, in_ci=name in IN_CI) for name in names]

    def run(
        self, cases: Sequence[Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run the stretches, two at a time."""
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            running = {}
            for case in cases:
                kind, _, name = case.name.partition("/")
                judge = _killed if kind == "kills" else _steady
                own = folder / case.name
                own.mkdir(parents=True)
                running[pool.submit(judge, name, own)] = case
            for done in as_completed(running):
                yield running[done], done.result()


SUITE = Soak()


def _killed(stretch: str, folder: Path) -> Verdict:
    """Run all starts of a stretch; return what was wrong, each with its start."""
    complaints: dict[str, list[str]] = {}
    for number, planned in enumerate(starts_of(stretch, N_STARTS)):
        plan = replace(planned, floor=_floor(folder))
        found = _one_start(plan, folder)
        for column, text in found:
            told = f"start {number} ({plan.size} ranks, {plan.end}): {text}"
            complaints.setdefault(column, []).append(told)
        if found:
            break
    return Verdict(**{column: "; ".join(t) for column, t in complaints.items()})


def _one_start(plan: Start, folder: Path) -> list[tuple[str, str]]:
    arguments = [str(folder), json.dumps(asdict(plan))]
    program = start(["-m", "mpi4py", RUN_PROGRAM, *arguments], size=plan.size)
    if plan.end == "tree":
        _kill_at_the_moment(program, folder / "moment", plan.seed)
    outcome = finish(program, TIMEOUT_S)
    (folder / "output").write_text(outcome.output)
    if outcome.timed_out:
        return [("hung", outcome.output[-2000:])]
    found = [*_told(folder), *_wrong_end(plan, outcome)]
    return [*found, *_damage(folder / "run", _floor(folder))]


def _kill_at_the_moment(
    program: "subprocess.Popen[str]", moment: Path, seed: str
) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not moment.exists() and program.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(random.Random(seed).uniform(0, 0.2))
    kill(program)
    moment.unlink(missing_ok=True)


def _floor(folder: Path) -> int | None:
    """Return the step that was last told to be published, or gone back to."""
    path = folder / "journal"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(lines[-1].split()[1]) if lines else None


def _told(folder: Path) -> list[tuple[str, str]]:
    path = folder / "complaints"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(column, text) for column, text in map(json.loads, lines)]


def _wrong_end(plan: Start, outcome: Outcome) -> list[tuple[str, str]]:
    code, output = outcome.returncode, outcome.output
    expected = {"close": code == 0, "SIGTERM": code == REQUEUE, "body": code != 0}
    expected["SIGUSR1"] = expected["SIGTERM"]
    was_killed = code not in (0, REQUEUE) and "Traceback" not in output
    if expected.get(plan.end, was_killed):
        return []
    return [("wrong_error", f"exit status {code}: {output[-2000:]}")]


def _damage(run: Path, floor: int | None) -> list[tuple[str, str]]:
    """Look at all checkpoints that the start has left."""
    found = []
    listed = checkpoints(run)
    newest = listed[-1].step if listed else None
    if floor is not None and (newest is None or newest < floor):
        found.append(("lost", f"{floor} was published; the newest is {newest}"))
    for entry in listed:
        try:
            with open_checkpoint(entry.path) as checkpoint:
                loaded, size = checkpoint.load(), checkpoint.manifest.world_size
            problem = global_problem(loaded, size)
            if not verify_checkpoint(entry.path).is_whole:
                problem = "not whole"
        except CheckpointError as error:
            problem = str(error)
        if problem or loaded["step"] != entry.step:
            found.append(("silent", f"{entry.path.name}: {problem or loaded['step']}"))
    return found


def _steady(mode: str, folder: Path) -> Verdict:
    report = folder / "report.json"
    arguments = [str(folder / "run"), mode, str(N_CYCLES), str(WARM_UP), str(report)]
    program = start(
        ["-m", "mpi4py", STEADY_PROGRAM, *arguments],
        size=N_RANKS,
        environ=WITHOUT_FOREIGN_GROWTH,
    )
    outcome = finish(program, TIMEOUT_S)
    if outcome.timed_out:
        return Verdict(hung=outcome.output[-2000:])
    if outcome.returncode or not report.exists():
        return Verdict(wrong_error=outcome.output[-2000:])
    return Verdict(rubbish="; ".join(_growth(mode, json.loads(report.read_text()))))


def _growth(mode: str, ranks: Sequence[dict]) -> Iterator[str]:
    """Yield what did not stay flat, and on which rank."""
    for rank, seen in enumerate(ranks):
        if seen["allocated"] > MOST_ALLOCATED_A_CYCLE:
            yield f"rank {rank} allocates {seen['allocated']:.0f} bytes more a cycle"
        if seen["resident"] > MOST_RESIDENT:
            yield f"rank {rank} has grown by {seen['resident']} bytes"
        first, *later = seen["held"]
        for held in later:
            grown = {name: held[name] for name in held if held[name] > first[name]}
            if grown:
                yield f"rank {rank} holds {grown}, of {first} after the warm-up"
                break
    if ranks[0]["most_rejected"] > MOST_REJECTED:
        yield f"{ranks[0]['most_rejected']} rejected checkpoints at a time"
    if mode == "failing" and not ranks[0]["failed"]:
        yield "no save failed"
