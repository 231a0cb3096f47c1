"""The manager under a real MPI: all ranks decide alike, signals included."""

import os
import signal
from types import SimpleNamespace

import pytest

import mpickpt
from mpickpt import EveryMinutes, EverySteps, Preemption
from mpickpt.parallel import run_keeper, watch
from mpickpt.storage.lease import Lease
from tests.training import Training, manager_of, saved_step, train

EACH = EverySteps(1)


@pytest.fixture
def run(shared_tmp_path):
    return shared_tmp_path / "run"


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def steps_of(run, comm):
    comm.Barrier()
    return [entry.step for entry in mpickpt.checkpoints(run)]


@pytest.mark.parametrize("progress", ["poll", "thread"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_run_goes_on_where_it_was_saved(comm, run, progress, asynchronous):
    options = {"when": EACH, "keep": 2, "progress": progress}
    train(run, comm, steps=5, asynchronous=asynchronous, **options)

    first, last, code = train(run, comm, steps=8, asynchronous=asynchronous, **options)

    assert (first, last, code) == (5, 7, 0)
    assert steps_of(run, comm) == [6, 7]
    assert sorted(p.name for p in run.glob("step*")) == [
        "step-0000000006",
        "step-0000000007",
    ]
    assert saved_step(mpickpt.latest(run)) == 7


def stops(run, comm, signal_at, **options):
    """Train until a stop; `signal_at` sends signals; return where each rank stopped."""
    preemption = Preemption(install=True)
    _, last, code = train(
        run,
        comm,
        steps=40,
        each=lambda _manager, step: signal_at(step),
        preemption=preemption,
        **options,
    )
    return comm.allgather((last, code))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_one_rank_stops_all_at_the_same_step(comm, run, number):
    def signal_at(step):
        if step == 5 and comm.rank == comm.size - 1:
            os.kill(os.getpid(), number)

    stopped = stops(run, comm, signal_at)

    assert stopped == [(6, 85)] * comm.size
    assert steps_of(run, comm) == [6]
    assert saved_step(mpickpt.latest(run)) == 6


def test_signals_twice_in_a_row_to_several_ranks_stop_once(comm, run):
    def signal_at(step):
        if step in (5, 6):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)

    stopped = stops(run, comm, signal_at, when=EACH, keep=1)

    assert stopped == [(6, 85)] * comm.size
    assert steps_of(run, comm) == [6]


class SignalledTraining(Training):
    """Its state is asked for in the midst of a save; there the signal comes."""

    signalled = False

    def state(self):
        if self.step == 4 and self.rank == 0 and not self.signalled:
            self.signalled = True
            os.kill(os.getpid(), signal.SIGTERM)
        return super().state()


def test_signal_in_the_midst_of_a_save_stops_all_at_the_same_step(comm, run):
    training = SignalledTraining(comm)
    preemption = Preemption(install=True)
    with manager_of(run, comm, training, preemption=preemption, when=EACH) as manager:
        for step in range(40):
            training.train(step)
            manager.save_if_due(step)
            if manager.should_stop:
                break

    assert comm.allgather((step, manager.exit_code)) == [(6, 85)] * comm.size
    assert steps_of(run, comm) == [1, 2, 3, 4, 5, 6]


def test_clock_of_rank_0_counts_for_all(comm, run, monkeypatch):
    done = []
    clock = SimpleNamespace(monotonic=lambda: 1e6 * (1 + comm.rank) + 20.0 * len(done))
    monkeypatch.setattr(watch, "time", clock)

    train(
        run,
        comm,
        steps=12,
        when=EveryMinutes(1),
        each=lambda _manager, step: done.append(step),
    )

    # What is decided at a step is what was so at the step before.
    assert steps_of(run, comm) == [3, 7, 11]


def test_error_of_the_lease_is_the_same_on_all_ranks(comm, run, monkeypatch):
    monkeypatch.setattr(run_keeper, "LEASE_PATIENCE_S", 0.0)
    lease = Lease.acquire(run, beat_s=0.1) if comm.rank == 0 else None
    comm.Barrier()

    with pytest.raises(mpickpt.LeaseHeldError) as raised:
        train(run, comm, steps=3, when=EACH)

    assert len(set(comm.allgather(str(raised.value)))) == 1
    comm.Barrier()
    if lease is not None:
        lease.release()
