"""Signals and wall time, of one process; what all ranks make of it is the manager's."""

import os
import signal
import subprocess
import threading
import time

import pytest

from mpickpt import Preemption
from mpickpt.parallel import preemption as preemption_module
from mpickpt.parallel.preemption import parse_time_left, slurm_end_time_s


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


@pytest.fixture
def earlier():
    """Handlers of the program: what they were called with."""
    called = []
    before = {
        number: signal.signal(number, lambda n, _frame: called.append(n))
        for number in (signal.SIGUSR1, signal.SIGTERM)
    }
    yield called
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_asks_for_a_stop_and_reaches_the_handler_of_before(earlier, number):
    preemption = Preemption(install=True)
    preemption.open()

    for _ in range(2):
        os.kill(os.getpid(), number)

    assert preemption.is_requested
    assert earlier == [number, number]
    preemption.close()


def test_handlers_are_put_back_by_the_last_user(earlier):
    before = signal.getsignal(signal.SIGTERM)
    preemption = Preemption(install=True)
    preemption.open()
    preemption.open()

    preemption.close()
    meanwhile = signal.getsignal(signal.SIGTERM)
    preemption.close()

    assert meanwhile != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_handlers_come_again_with_a_later_user(earlier):
    preemption = Preemption(install=True)
    preemption.open()
    preemption.close()

    preemption.open()
    os.kill(os.getpid(), signal.SIGTERM)

    assert preemption.is_requested
    preemption.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_handlers_of_several_are_put_back_whoever_closes_first(earlier, order):
    before = signal.getsignal(signal.SIGTERM)
    several = [Preemption(install=True) for _ in range(2)]
    for preemption in several:
        preemption.open()

    several[order[0]].close()
    os.kill(os.getpid(), signal.SIGTERM)
    is_noticed = several[order[1]].is_requested
    several[order[1]].close()

    assert is_noticed
    assert earlier == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before


def test_close_more_often_than_open_takes_nothing_from_others(earlier):
    closed, other = Preemption(install=True), Preemption(install=True)
    closed.open()
    other.open()

    for _ in range(3):
        closed.close()
    os.kill(os.getpid(), signal.SIGTERM)

    assert other.is_requested
    other.close()


def test_no_handler_is_installed_outside_slurm(earlier):
    before = signal.getsignal(signal.SIGTERM)

    Preemption()

    assert signal.getsignal(signal.SIGTERM) == before


def test_handlers_are_installed_inside_slurm(earlier, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    before = signal.getsignal(signal.SIGTERM)
    preemption = Preemption()
    preemption.open()

    during = signal.getsignal(signal.SIGTERM)
    preemption.close()

    assert during != before


def test_other_threads_install_none_and_refuse_to(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    before = signal.getsignal(signal.SIGTERM)
    raised = []

    def make():
        Preemption().open()
        try:
            Preemption(install=True)
        except ValueError as error:
            raised.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()

    assert signal.getsignal(signal.SIGTERM) == before
    assert "main thread" in raised[0]


def test_request_is_seen_alike_all_through_a_step():
    preemption = Preemption(install=False)
    seen = [preemption.is_requested_at(3)]

    preemption.request()

    seen += [preemption.is_requested_at(step) for step in (3, 4, 4)]
    assert seen == [False, False, True, True]


def test_time_left_does_not_follow_the_system_clock(monkeypatch):
    preemption = Preemption(install=False, end_time_s=time.time() + 100)
    now_s = time.time()

    monkeypatch.setattr(preemption_module.time, "time", lambda: now_s + 5000)

    assert 90 < preemption.time_left_s() <= 100


def test_time_left_is_infinite_where_nobody_knows():
    assert Preemption(install=False).time_left_s() == float("inf")


def test_slurm_is_asked_once():
    asked = []
    preemption = Preemption(install=False)

    for _ in range(3):
        preemption.time_left_s(lambda: asked.append(1))

    assert asked == [1]


def test_end_time_of_the_environment_is_taken(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1900000000")

    assert slurm_end_time_s() == 1_900_000_000


@pytest.mark.parametrize(
    ("answer", "left_s"), [("1:30\n", 90), ("UNLIMITED\n", None), ("", None)]
)
def test_queue_is_asked_where_the_environment_is_silent(monkeypatch, answer, left_s):
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def run(command, **_options):
        assert command[0] == "squeue"
        return subprocess.CompletedProcess(command, 0, stdout=answer)

    monkeypatch.setattr(preemption_module.subprocess, "run", run)
    found = slurm_end_time_s()

    if left_s is None:
        assert found is None
    else:
        assert found == pytest.approx(time.time() + left_s, abs=5)


def test_queue_that_is_not_there_is_no_failure(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", "/nowhere")

    assert slurm_end_time_s() is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0:05", 5),
        ("12:34", 754),
        ("1:00:00", 3600),
        ("2-03:04:05", 183_845),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("x-1:00", None),
        ("1:2:3:4", None),
        ("", None),
    ],
)
def test_time_left_is_parsed(text, seconds):
    assert parse_time_left(text) == seconds
