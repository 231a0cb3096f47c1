"""MPI program: saves while strace fails one system call of one rank, case by case.

``errors_saves.py MODE FOLDER CASES``: CASES is a JSON file. Rank 0 appends a line to
FOLDER/said when a case begins, and one with what each rank said when it ends. A case
that injects nothing is recorded: its hits are what strace saw on each rank.
"""

import contextlib
import json
import os
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.crash.programs.injection import Fault, injected, traced
from tests.faults.programs.errors_cases import Moments, Said, run_case, say
from tests.faults.programs.errors_modes import (
    COMM,
    MODES,
    fresh_copies,
    name_files_alike,
)

RECORD = ["-f", "-y", "-s", "0", "-e", "trace=%file,%desc,memfd_create"]


@contextlib.contextmanager
def recorded() -> Iterator[list[str]]:
    """Record every call that is about files."""
    lines: list[str] = []
    with traced(RECORD) as seen:
        yield lines
    lines += seen


@contextlib.contextmanager
def fault_of(case: Said, run: Path, moments: Moments) -> Iterator[list[str]]:
    """Have strace fail what the case says, on its rank."""
    hits: list[str] = []
    if case["rank"] != COMM.rank:
        yield hits
        return
    fault = Fault(
        rank=COMM.rank,
        inject=case["inject"],
        threads=case["way"] == "all",
        path=tuple(os.path.normpath(run / path) for path in case["paths"]),
    )
    each: list[list[str]] = []
    with contextlib.ExitStack() as stack:

        def attach() -> None:
            tid = threading.get_native_id()
            each.append(stack.enter_context(injected(fault, tid)))

        if case["way"] in ("all", "main"):
            attach()
        else:
            moments.at(case["way"], attach)
        yield hits
        moments.at(None)
    hits += [line for lines in each for line in lines]


def main() -> None:
    name, folder, cases = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    # A close that strace refuses leaves the descriptor open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    restart_names = name_files_alike()
    moments = Moments()
    mode = next(mode for mode in MODES if mode.name == name)
    copies = fresh_copies(mode, folder)
    for case in json.loads(cases.read_text()):
        run = next(copies)
        restart_names()
        say(folder, {"case": case["name"], "begins": True})
        fault = fault_of(case, run, moments) if case.get("inject") else recorded()
        gathered = COMM.gather(run_case(mode, run, fault))
        say(folder, {"case": case["name"], "run": str(run), "ranks": gathered})


main()
