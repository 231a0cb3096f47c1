"""Jobs that are told to stop: all ranks save and stop at one step, and go on later."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

import mpickpt
from mpickpt.storage.verification import verify_checkpoint
from tests.crash.small_state import files_of
from tests.mpi_launch import finish, kill, pythons, start
from tests.training import saved_step

PROGRAM = "tests/crash/programs/preempted_run.py"
TRIALS = "tests/crash/programs/preempted_trials.py"
SIZE = 4
TIMEOUT_S = 90
REQUEUE = 85

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def launch(run):
    """Start jobs on the run; kill what is left of them."""
    programs = []

    def start_job(*options, rank=0, restarts=0, size=SIZE, **environ):
        environ |= {
            "MPICKPT_TEST_RANK": str(rank),
            "SLURM_RESTART_COUNT": str(restarts),
            "MPICKPT_TIMEOUT_S": "30",
        }
        arguments = ["-m", "mpi4py", PROGRAM, str(run), *options]
        program = start(arguments, size=size, environ=environ)
        programs.append(program)
        return program

    yield start_job
    for program in programs:
        if program.poll() is None:
            kill(program)
            program.communicate(timeout=30)


def pid_at_the_moment(run, program):
    """Wait until a rank says that it is where the signal is wanted."""
    path, end = run.parent / "moment", time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert program.poll() is None, program.communicate()[0]
        assert time.monotonic() < end, "the moment did not come"
        time.sleep(0.01)
    pid = int(path.read_text().rpartition(" ")[2])
    path.unlink()
    return pid


def reports_of(run, program):
    outcome = finish(program, TIMEOUT_S)
    assert not outcome.timed_out, outcome.output[-5000:]
    path = run.parent / "reports.json"
    assert path.exists(), outcome.output[-5000:]
    reports = json.loads(path.read_text())
    path.unlink()
    return outcome.returncode, reports


def require_one_stop(run, program):
    """Assert that all ranks stopped at one step, which is saved; return the step."""
    code, reports = reports_of(run, program)
    assert len(reports) == SIZE
    assert len({(report["last"], report["code"]) for report in reports}) == 1, reports
    assert reports[0]["code"] == code == REQUEUE
    assert saved_step(mpickpt.latest(run)) == reports[0]["last"]
    return reports[0]["last"]


@pytest.mark.parametrize(
    ("moment", "rank", "number"),
    [
        ("training", 0, signal.SIGTERM),
        ("training", 3, signal.SIGUSR1),
        ("saving", 2, signal.SIGTERM),
        ("staging", 1, signal.SIGTERM),
        ("twice", 3, signal.SIGTERM),
    ],
)
def test_signal_to_one_rank_stops_all_and_the_next_start_goes_on(
    launch, run, moment, rank, number
):
    job = launch("--await", moment, rank=rank)

    pid = pid_at_the_moment(run, job)
    os.kill(pid, number)
    if moment == "twice":
        os.kill(pid, signal.SIGUSR1)
    last = require_one_stop(run, job)
    code, reports = reports_of(run, launch("--steps", str(last + 4), restarts=1))

    assert last in (7, 8)
    assert code == 0
    assert {report["first"] for report in reports} == {last}


@pytest.mark.parametrize(
    ("python", "threads", "n_trials"),
    [
        pytest.param(pythons()[0], "multiple", 80, id="multiple"),
        pytest.param(pythons()[0], "funneled", 20, id="funneled"),
        *(
            pytest.param(python, "multiple", 20, id=Path(python).parts[-3])
            for python in pythons()[1:]
        ),
    ],
)
def test_signals_at_random_moments_stop_all_ranks_at_the_same_step(
    tmp_path, python, threads, n_trials
):
    seed = int(os.environ.get("MPICKPT_TEST_SEED", random.randrange(2**32)))
    print(f"MPICKPT_TEST_SEED={seed}")
    arguments = [TRIALS, str(tmp_path / "run"), str(n_trials), str(seed), threads]
    environ = {"MPICKPT_TIMEOUT_S": "60"}
    job = start(["-m", "mpi4py", *arguments], size=8, python=python, environ=environ)

    outcome = finish(job, 200)

    assert not outcome.timed_out, outcome.output[-5000:]
    assert outcome.returncode == 0, outcome.output[-5000:]
    trials = json.loads((tmp_path / "trials.json").read_text())
    assert len(trials) == n_trials
    for trial in trials:
        ((step, should_stop, code),) = trial["stops"]
        assert should_stop
        assert code == REQUEUE
        assert trial["saved"] == step


def test_run_killed_at_any_moment_goes_on_from_what_was_published(launch, run):
    job = launch("--await", "saving", rank=1)
    pid_at_the_moment(run, job)
    kill(job)
    job.communicate(timeout=30)
    published = [entry.step for entry in mpickpt.checkpoints(run)]

    _, reports = reports_of(run, launch("--steps", "12", restarts=1))

    assert {report["first"] for report in reports} == {published[-1]}
    assert [saved_step(entry.path) for entry in mpickpt.checkpoints(run)] == [8, 10]
    assert sorted(p.name for p in run.glob("step-*")) == [
        "step-0000000008",
        "step-0000000010",
    ]


@pytest.mark.parametrize("fault", ["die_after_unpublish", "die_while_removing"])
def test_nothing_listed_is_half_deleted_after_a_crash_while_pruning(launch, run, fault):
    outcome = finish(launch("--fault", fault), TIMEOUT_S)
    listed = [entry.path for entry in mpickpt.checkpoints(run)]
    wholes = [verify_checkpoint(path) for path in listed]
    n_directories = len(list(run.glob("step-*")))

    code, reports = reports_of(run, launch("--steps", "12", restarts=1))

    assert outcome.returncode != 0
    assert len(listed) >= 2
    assert all(report.is_whole for report in wholes)
    assert n_directories > len(listed)
    assert code == 0
    assert f"{reports[0]['first']:010d}" in listed[-1].name
    assert {path.name for path in run.glob("step-*")} == {
        "step-0000000008",
        "step-0000000010",
    }


def test_exception_in_the_body_of_one_rank_ends_the_job_and_costs_one_save(launch, run):
    begin = time.monotonic()
    outcome = finish(launch("--fault", "body", rank=2), TIMEOUT_S)
    lasted_s = time.monotonic() - begin
    published = [entry.step for entry in mpickpt.checkpoints(run)]

    _, reports = reports_of(run, launch("--steps", "12", restarts=1))

    assert outcome.returncode != 0
    assert "the body failed" in outcome.output
    assert lasted_s < 30
    assert published[-1] in (4, 6)
    assert {report["first"] for report in reports} == {published[-1]}


def test_interrupt_of_one_rank_ends_the_job(launch, run):
    job = launch("--await", "training", rank=1)
    pid = pid_at_the_moment(run, job)

    os.kill(pid, signal.SIGINT)
    outcome = finish(job, TIMEOUT_S)

    assert not outcome.timed_out
    assert outcome.returncode != 0
    assert "KeyboardInterrupt" in outcome.output
    assert mpickpt.checkpoints(run)[-1].step in (2, 4)


def test_rank_that_dies_in_the_background_leaves_the_checkpoint_of_before(launch, run):
    outcome = finish(launch("--fault", "die_in_the_background", rank=1), TIMEOUT_S)
    published = [entry.step for entry in mpickpt.checkpoints(run)]

    _, reports = reports_of(run, launch("--steps", "12", restarts=1))

    assert outcome.returncode != 0
    assert published == [2, 4]
    assert {report["first"] for report in reports} == {4}
    assert not [name for name in files_of(run) if name.endswith(".tmp")]


def test_mistyped_directory_of_a_requeued_job_is_an_error(launch, run):
    outcome = finish(launch("--steps", "3", restarts=1), TIMEOUT_S)

    assert outcome.returncode not in (0, REQUEUE)
    assert "CheckpointNotFoundError" in outcome.output
    assert str(run) in outcome.output


@pytest.mark.parametrize(
    ("threads", "progress"),
    [("single", "poll"), ("funneled", "poll"), ("multiple", "thread")],
)
def test_run_ends_well_at_each_level_of_threads(launch, run, threads, progress):
    code, reports = reports_of(run, launch("--steps", "9", "--threads", threads))

    assert code == 0
    assert {report["progress"] for report in reports} == {progress}
    assert [saved_step(entry.path) for entry in mpickpt.checkpoints(run)] == [6, 8]


def test_log_that_is_asked_for_has_one_line_for_each_save(launch):
    outcome = finish(launch("--steps", "9", MPICKPT_LOG="info"), TIMEOUT_S)

    lines = [line for line in outcome.output.splitlines() if ": saved " in line]
    assert outcome.returncode == 0
    assert [line.partition(": step ")[2].split(":")[0] for line in lines] == list(
        "2468"
    )
