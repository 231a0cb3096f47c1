"""Ranks that stop, stay away or are interrupted: the others never wait for ever."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.mpi_launch import finish, kill, mpiexec_of, pythons, start

TIMEOUT_S = 2.0
# The deadline, the roll call, and slack for a loaded machine of two cores.
GRACE_S = 15.0
PROGRAM = Path(__file__).with_name("hang_program.py")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.parametrize("python", pythons(), ids=lambda p: Path(p).parts[-3]),
]


@pytest.fixture
def launch(tmp_path, python):
    """Start the program with one rank that misbehaves; kill what is left."""
    programs = []

    def start_program(behaviour, *, culprit, size=4):
        arguments = [str(PROGRAM), behaviour, str(culprit), str(tmp_path)]
        environ = {"MPICKPT_TIMEOUT_S": str(TIMEOUT_S)}
        program = start(
            ["-m", "mpi4py", *arguments], size=size, python=python, environ=environ
        )
        programs.append(program)
        return program

    yield start_program
    for program in programs:
        if program.poll() is None:
            kill(program)
            program.communicate(timeout=30)


def wait_for(paths, within_s):
    """Return the reports of ranks, as soon as all have written one."""
    end = time.monotonic() + within_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, (
            f"no report: {[p for p in paths if not p.exists()]}"
        )
        time.sleep(0.05)
    return [json.loads(path.read_text()) for path in paths]


def reports_of_others(tmp_path, *absent, size=4):
    ranks = [rank for rank in range(size) if rank not in absent]
    return wait_for([tmp_path / f"rank{rank}.json" for rank in ranks], 60)


def assert_named_in_time(reports, culprit):
    for report in reports:
        assert report["error"] == "CollectiveTimeoutError"
        assert report["missing_ranks"] == [culprit]
        assert report["waited_s"] < TIMEOUT_S + GRACE_S
        assert report["later_error"] == "CollectiveTimeoutError"
        assert report["later_waited_s"] < 1.0


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    "behaviour", ["never_calls", "sleeps_later", "leaves_exchange"]
)
def test_others_name_the_rank_that_stays_away(launch, tmp_path, behaviour, culprit):
    launch(behaviour, culprit=culprit)

    reports = reports_of_others(tmp_path, culprit)

    assert_named_in_time(reports, culprit)


@pytest.mark.parametrize("culprit", [0, 3])
def test_others_name_the_rank_that_is_stopped(launch, tmp_path, culprit):
    launch("stops_itself", culprit=culprit)

    try:
        assert_named_in_time(reports_of_others(tmp_path, culprit), culprit)
    finally:
        pid = int((tmp_path / "culprit.pid").read_text())
        os.kill(pid, signal.SIGCONT)


def test_rank_stopped_amid_its_work_is_named(launch, tmp_path):
    launch("stops_in_work", culprit=1)

    try:
        assert_named_in_time(reports_of_others(tmp_path, 1), 1)
    finally:
        os.kill(int((tmp_path / "culprit.pid").read_text()), signal.SIGCONT)


@pytest.mark.parametrize("culprit", [0, 2])
def test_interrupt_on_one_rank_raises_there_and_is_told_to_others(
    launch, tmp_path, culprit
):
    launch("interrupts_itself", culprit=culprit)

    reports = reports_of_others(tmp_path, culprit, 3)
    own = wait_for([tmp_path / f"rank{culprit}.json"], 60)[0]

    assert_named_in_time(reports, culprit)
    assert own["error"] == "KeyboardInterrupt"


def test_whole_job_ends_by_itself_after_a_rank_stays_away(launch):
    program = launch("exits_early", culprit=1)

    outcome = finish(program, 60)

    assert not outcome.timed_out
    assert outcome.returncode != 0
    assert "CollectiveTimeoutError" in outcome.output
    assert "rank 1 did not arrive" in outcome.output


def test_rank_that_comes_late_to_a_given_up_call_raises_soon(launch, tmp_path):
    launch("comes_late", culprit=2)

    assert_named_in_time(reports_of_others(tmp_path, 2), 2)
    late = wait_for([tmp_path / "rank2.json"], 60)[0]

    assert late["error"] == "CollectiveTimeoutError"
    assert late["waited_s"] < TIMEOUT_S + GRACE_S


def test_interpreter_without_a_communicator_never_imports_mpi(python):
    program = (
        "import sys, mpickpt.parallel.collective as c;"
        "c.run(c.conversations_of(None).save.allgather(b'x', 'p'));"
        "assert 'mpi4py' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[2]
    assert mpiexec_of(python)

    subprocess.run(
        [python, "-c", program],
        check=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
