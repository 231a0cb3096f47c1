"""Runs the errors suite's programs, and again without a case that ended one."""

import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.matrix import Verdict
from tests.mpi_launch import kill, start

SIZE = 4
SILENCE_S = 60.0
SIDE_BY_SIDE = 2

Said = dict[str, Any]
Judge = Callable[[Said], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Cases for one program, one after the other.

    Attributes
    ----------
    arguments : tuple of str
        The program and its first arguments; a folder and a file of cases follow.
    cases : tuple of dict
        What the program takes; each has a ``name``.
    judge : callable
        Makes a verdict of a line that the program said of a case.
    prefix : tuple of str
        What mpiexec is started by.
    """

    arguments: tuple[str, ...]
    cases: tuple[Said, ...]
    judge: Judge
    prefix: tuple[str, ...] = ()


def side_by_side(jobs: Sequence[Job], folder: Path) -> Iterator[tuple[str, Verdict]]:
    """Run jobs, two at a time; yield the name of each case with its verdict."""
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[tuple[Job, Path]] = queue.SimpleQueue()
    for number, job in enumerate(jobs):
        waiting.put((job, folder / f"job{number}"))

    for _ in range(SIDE_BY_SIDE):
        arguments = (waiting, done)
        threading.Thread(target=_run_jobs, args=arguments, daemon=True).start()
    running = SIDE_BY_SIDE
    while running:
        outcome = done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is None:
            running -= 1
        else:
            yield outcome


def _run_jobs(
    waiting: "queue.SimpleQueue[tuple[Job, Path]]", done: "queue.SimpleQueue[Any]"
) -> None:
    try:
        while True:
            for outcome in verdicts(*waiting.get_nowait()):
                done.put(outcome)
    except queue.Empty:
        done.put(None)
    except BaseException as failure:
        done.put(failure)


def verdicts(job: Job, folder: Path) -> Iterator[tuple[str, Verdict]]:
    """Run a job; where its program ends or hangs in a case, go on behind that."""
    left = {case["name"]: case for case in job.cases}
    while left:
        folder.mkdir(parents=True)
        begun = next(iter(left))
        for line in _said_by(job, list(left.values()), folder):
            if "ranks" in line:
                del left[line["case"]]
                begun = next(iter(left), "")
                yield line["case"], job.judge(line)
        if left:
            del left[begun]
            text = (folder / "output").read_text(errors="replace")[-3000:]
            yield begun, Verdict(hung=f"the program ended, or hung, in it: {text}")
        shutil.rmtree(folder)


def _said_by(job: Job, cases: list[Said], folder: Path) -> Iterator[Said]:
    """Yield what the program says, until it ends or says nothing for too long."""
    listed, said = folder / "cases", folder / "said"
    listed.write_text(json.dumps(cases))
    said.touch()
    arguments = ["-m", "mpi4py", *job.arguments, str(folder), str(listed)]
    with (folder / "output").open("w") as output, said.open() as lines:
        program = start(arguments, size=SIZE, output=output, prefix=job.prefix)
        try:
            deadline = time.monotonic() + SILENCE_S
            while True:
                has_ended = program.poll() is not None
                place = lines.tell()
                line = lines.readline()
                if line.endswith("\n"):
                    deadline = time.monotonic() + SILENCE_S
                    yield json.loads(line)
                elif has_ended or time.monotonic() > deadline:
                    return
                else:
                    lines.seek(place)
                    time.sleep(0.02)
        finally:
            kill(program)
            program.wait()
