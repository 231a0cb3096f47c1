"""Run the fault matrix: python -m tests.faults [--part ci] [SUITE[/CASE] ...].

Every case that fails prints the command that runs it alone. The exit status is 0
only if no case has a complaint.
"""

import argparse
import importlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.matrix import Case, Suite, Tally, Verdict, closing_table
from tests.mpi_launch import remove_orphaned_shared_memory

SUITES = (
    "errors",
    "death",
    "power_loss",
    "network",
    "damage",
    "hostile",
    "readers",
    "soak",
)

Report = Callable[[str, Case, Verdict], None]


def suite_of(name: str) -> Suite:
    """Import a suite."""
    suite: Suite = importlib.import_module(f"tests.faults.{name}").SUITE
    return suite


def chosen(suite: Suite, part: str, names: Sequence[str]) -> list[Case]:
    """Return the cases of a part that have one of the names, or begin with one."""
    return [
        case
        for case in suite.cases()
        if (part == "whole" or case.in_ci)
        and (not names or any(_is_below(f"{suite.name}/{case.name}", n) for n in names))
    ]


def run_suite(suite: Suite, cases: Sequence[Case], folder: Path, say: Report) -> Tally:
    """Run cases of a suite, in an empty folder below `folder`."""
    tally = Tally(suite.name)
    tally.not_run = suite.why_not() or ""
    if tally.not_run or not cases:
        return tally
    own = folder / suite.name
    own.mkdir(parents=True)
    started = time.monotonic()
    left = {case.name: case for case in cases}
    for case, verdict in suite.run(cases, own):
        del left[case.name]
        tally.add(case, verdict)
        say(suite.name, case, verdict)
    for case in left.values():
        tally.add(case, Verdict(hung="the suite ended without running it"))
        say(suite.name, case, Verdict(hung="the suite ended without running it"))
    tally.seconds = time.monotonic() - started
    remove_orphaned_shared_memory()
    return tally


def print_complaints(suite: str, case: Case, verdict: Verdict) -> None:
    """Print what was wrong with a case, and how to run it again."""
    for column, text in verdict.complaints.items():
        print(f"{suite}/{case.name}: {column}: {text}", flush=True)
    if verdict.complaints:
        print(f"  again: python -m tests.faults '{suite}/{case.name}'", flush=True)


def main() -> int:
    """Run what the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--part", choices=("ci", "whole"), default="whole")
    parser.add_argument("--keep", type=Path, help="run here, and leave the files")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    parser.add_argument("names", nargs="*", metavar="SUITE[/CASE]")
    options = parser.parse_args()
    wanted = [name.rstrip("/") for name in options.names]
    suites = [
        suite_of(name)
        for name in SUITES
        if not wanted or name in {w.partition("/")[0] for w in wanted}
    ]
    tallies = []
    folder = options.keep or Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        for suite in suites:
            cases = chosen(suite, options.part, wanted)
            if options.list:
                print(*(f"{suite.name}/{case.name}" for case in cases), sep="\n")
                continue
            tallies.append(run_suite(suite, cases, folder, print_complaints))
            print(f"{suite.name}: {tallies[-1].n_cases} cases", flush=True)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    if options.list:
        return 0
    print(closing_table(tallies))
    ran = sum(tally.n_cases for tally in tallies)
    return 1 if not ran or any(tally.failed for tally in tallies) else 0


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}/")


if __name__ == "__main__":
    sys.exit(main())
