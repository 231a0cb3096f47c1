"""Runs tests/parallel under mpiexec, on several world sizes, in a serial session."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.mpi_launch import Outcome, finish, pythons, start

WORLD_SIZES = [1, 2, 4, 7]
# With another MPI, one that is even and one that is odd.
OTHER_WORLD_SIZES = [2, 7]
SUITE_TIMEOUT_S = 600
COUNTS = re.compile(r"\b(\d+) (passed|failed|errors?|skipped|xfailed|deselected)\b")
OPTIONS = [
    *("-m", "mpi4py", "-m", "pytest", "--with-mpi", "-q", "--color=no", "-rs"),
    *("-p", "no:cacheprovider", "-p", "no:randomly", "tests/parallel"),
]


def counts_of(output: str) -> dict[str, int]:
    """Return the counts of the last line that has some."""
    lines = [line for line in output.splitlines() if COUNTS.search(line)]
    if not lines:
        return {}
    return {word: int(number) for number, word in COUNTS.findall(lines[-1])}


def fail_with(outcome: Outcome, reason: str) -> None:
    pytest.fail(f"{reason}\n{outcome.output[-20_000:]}", pytrace=False)


def runs() -> list[Any]:
    first, *others = pythons()
    pairs = [(first, size) for size in WORLD_SIZES]
    pairs += [(python, size) for python in others for size in OTHER_WORLD_SIZES]
    return [
        pytest.param(python, size, id=f"{Path(python).parts[-3]}-{size}")
        for python, size in pairs
    ]


@pytest.mark.timeout(SUITE_TIMEOUT_S + 60)
@pytest.mark.parametrize(("python", "size"), runs())
def test_parallel_suite_passes(python, size):
    program = start(OPTIONS, size=size, python=python)

    outcome = finish(program, SUITE_TIMEOUT_S)

    if outcome.timed_out:
        fail_with(outcome, f"tests/parallel hung for {SUITE_TIMEOUT_S} s")
    counts = counts_of(outcome.output)
    if outcome.returncode != 0 or counts.get("failed") or counts.get("error"):
        fail_with(outcome, f"tests/parallel failed with exit code {outcome.returncode}")
    if not counts.get("passed"):
        fail_with(outcome, "tests/parallel ran no tests")
    world = re.search(r"mpi world size: (\d+)", outcome.output)
    if world is None or int(world[1]) != size:
        fail_with(outcome, f"{size} ranks were started, MPI made a world of {world}")
    print(f"{size} ranks: {counts}")


def test_counts_are_read_from_the_closing_line():
    assert counts_of("x\n3 failed, 2 passed in 1 s\n") == {"failed": 3, "passed": 2}
    assert counts_of("no tests ran in 0.1 s") == {}
