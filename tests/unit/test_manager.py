"""What the manager does from step to step and from start to start; ranks as threads."""

import errno
import json
import logging
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

import mpickpt
from mpickpt import EveryMinutes, EverySteps, KeepBest, KeepLast, Preemption
from mpickpt.errors import StorageError
from mpickpt.parallel import retention, run_keeper, run_saver, watch
from mpickpt.storage.halt_file import HaltFile
from mpickpt.storage.lease import Lease
from tests.ranks_as_threads import run_ranks
from tests.states import failure_on_ranks, on_ranks
from tests.training import Training, manager_of, saved_step, train

SIZE = 2
EACH = EverySteps(1)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


def steps_of(run):
    return [entry.step for entry in mpickpt.checkpoints(run)]


def train_on_ranks(run, *, steps, size=SIZE, **options):
    outcomes = on_ranks(size, lambda comm: train(run, comm, steps=steps, **options))
    assert len(set(outcomes)) == 1, outcomes
    return outcomes[0]


def rejections(run):
    return {
        path.name.split(".")[0]: json.loads(path.read_text())["reason"]
        for path in sorted((run / ".mpickpt/rejected").glob("*.json"))
    }


def damage(run, step):
    path = mpickpt.step_path(run, step)
    shard = path / mpickpt.read_manifest(path).shards[-1].path
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def files_below(run):
    return {
        str(path.relative_to(run)): path.stat().st_ino
        for path in run.rglob("*")
        if "/lease/" not in str(path)
    }


# Starting and going on.


def test_first_start_restores_nothing_and_names_the_directory(run, caplog):
    training = Training()

    with manager_of(run, None, training) as manager:
        restored = manager.restore_latest()

    assert restored is None
    assert manager.next_step == 0
    assert str(run) in caplog.text


@pytest.mark.parametrize("asynchronous", [True, False])
def test_run_goes_on_after_the_last_saved_step(run, asynchronous):
    options = {"when": EverySteps(3), "asynchronous": asynchronous}
    train_on_ranks(run, steps=8, **options)

    first, last, code = train_on_ranks(run, steps=11, **options)

    assert (first, last, code) == (7, 10, 0)
    assert steps_of(run) == [3, 6, 9]


def test_notebook_saves_and_restores_without_a_communicator(run):
    train(run, None, steps=4, when=EACH)

    first, _, _ = train(run, None, steps=4, when=EACH)

    assert first == 4
    assert saved_step(mpickpt.latest(run)) == 3


def test_restored_tells_what_was_restored(run):
    train_on_ranks(run, steps=3, when=EACH)

    def restore(comm):
        with manager_of(run, comm, Training(comm)) as manager:
            return manager.restore_latest(verify="crc32")

    restored = on_ranks(SIZE, restore)[1]

    assert restored.step == restored.manifest.step == restored.state["step"] == 2
    assert restored.path == mpickpt.step_path(run, 2)
    assert restored.rejected == {}


def test_order_is_by_step_whatever_the_digits_and_the_times_of_files(run):
    def save_all(comm):
        training = Training(comm)
        with manager_of(run, comm, training, asynchronous=False) as manager:
            for step in (9, 10, 99, 100, 9_999_999_999, 10_000_000_000):
                training.train(step)
                manager.save(step)
            return manager.steps()

    expected = on_ranks(SIZE, save_all)[0]
    for age, path in enumerate(sorted(run.glob("step-*"), reverse=True)):
        for touched in (path, *path.iterdir()):
            os.utime(touched, (age * 1e6, age * 1e6))

    first, _, _ = train_on_ranks(run, steps=0)

    assert expected == [9, 10, 99, 100, 9_999_999_999, 10_000_000_000]
    assert first == 10_000_000_001


def test_requeued_job_refuses_a_mistyped_directory(run, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")

    error = failure_on_ranks(SIZE, lambda comm: train(run, comm, steps=1))

    assert isinstance(error, mpickpt.CheckpointNotFoundError)
    assert str(run) in str(error)


def test_requeued_job_starts_anew_when_told_so(run, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")

    def start(comm):
        with manager_of(run, comm, Training(comm)) as manager:
            return manager.restore_latest(required=False)

    assert on_ranks(SIZE, start) == [None, None]


def test_arguments_that_mean_nothing_are_refused(run):
    with pytest.raises(TypeError, match="when=100"):
        manager_of(run, None, Training(), when=100)
    with pytest.raises(ValueError, match="on_busy"):
        manager_of(run, None, Training(), on_busy="maybe")
    with pytest.raises(ValueError, match="progress"):
        manager_of(run, None, Training(), progress="often")


# What a checkpoint says of the run.


def test_manifest_names_the_job_and_its_restarts(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 86_400))

    def save(comm):
        training = Training(comm)
        with manager_of(run, comm, training, metadata={"a": 1}) as manager:
            manager.save(1, metrics={"loss": np.float32(0.5)})

    on_ranks(SIZE, save)

    manifest = mpickpt.read_manifest(mpickpt.latest(run))
    assert manifest.run["job_id"] == "4711"
    assert manifest.run["restart_count"] == 2
    assert manifest.metrics == {"loss": 0.5}
    assert manifest.metadata == {"a": 1}


def run_time_of(run, step):
    return mpickpt.read_manifest(mpickpt.step_path(run, step)).wall_clock_seconds


def test_run_time_adds_up_over_starts_and_not_over_rewinds(run, monkeypatch):
    clock = {"s": 100.0}
    monkeypatch.setattr(
        "mpickpt.parallel.save_call.seconds_since_start", lambda: clock["s"]
    )
    train(run, None, steps=2, when=EACH)
    clock["s"] = 10.0
    training = Training()

    with manager_of(run, None, training, asynchronous=False) as manager:
        manager.restore_latest()
        manager.save(2)
        clock["s"] = 15.0
        manager.rewind(1)
        manager.save(3)

    assert run_time_of(run, 1) == 100.0
    assert steps_of(run) == [1, 3]
    assert run_time_of(run, 3) == 115.0


def test_receipts_hold_the_seconds_of_each_rank(run):
    train_on_ranks(run, steps=2, when=EACH)

    (path,) = mpickpt.latest(run).glob("receipts-*.json")
    ranks = json.loads(path.read_text())["ranks"]

    assert [receipt["rank"] for receipt in ranks] == [0, 1]
    assert all(r["stage_seconds"] > 0 and r["write_seconds"] > 0 for r in ranks)


def test_rank_0_logs_one_line_for_each_save(run, caplog):
    caplog.set_level(logging.INFO, logger="mpickpt")

    train_on_ranks(run, steps=4, when=EACH)

    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3"]


# What stays.


def test_last_ones_stay_and_there_is_always_one(run, monkeypatch):
    seen = []
    unpublish = retention.unpublish

    def watched(path):
        seen.append(steps_of(run))
        return unpublish(path)

    monkeypatch.setattr(retention, "unpublish", watched)

    train_on_ranks(run, steps=5, when=EACH, keep=1)

    assert seen == [[1, 2], [2, 3], [3, 4]]
    assert steps_of(run) == [4]
    assert not (run / "step-0000000001").exists()


def test_best_by_a_metric_that_came_later_stays(run):
    def evaluate(manager, step):
        if step > 1:
            manager.wait()
        if manager._talks.save.rank == 0 and step > 1:
            mpickpt.set_metrics(run, step - 1, {"loss": abs(step - 1 - 2)})

    train_on_ranks(
        run,
        steps=7,
        when=EACH,
        keep=KeepLast(2) | KeepBest(1, "loss"),
        each=evaluate,
    )

    assert steps_of(run) == [2, 5, 6]


def test_pinned_checkpoint_stays(run):
    def pin(manager, step):
        if step == 3:
            manager.wait()
            manager.pin(1)

    train_on_ranks(run, steps=6, when=EACH, keep=2, each=pin)

    assert steps_of(run) == [1, 4, 5]


def test_foreign_files_and_directories_are_never_touched(run):
    train_on_ranks(run, steps=3, when=EACH)
    foreign = [
        run / "notes.txt",
        run / "step-12",
        run / "step-0000000001" / "notes.txt",
        run / "step-0000000007" / "rank.h5",
        run / ".mpickpt" / "mine",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")

    train_on_ranks(run, steps=6, when=EACH, keep=1)

    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)
    assert steps_of(run) == [5]


@pytest.mark.parametrize("call", ["unpublish", "remove_files", "retention_candidates"])
def test_what_cannot_be_removed_is_no_failure_of_the_save(
    run, monkeypatch, caplog, call
):
    def refuse(*_arguments):
        raise mpickpt.StorageError("I/O error", errno=5)

    monkeypatch.setattr(retention, call, refuse)

    code = train_on_ranks(run, steps=5, when=EACH, keep=2)

    assert code == (0, 4, 0)
    assert saved_step(mpickpt.latest(run)) == 4
    assert "cannot remove" in caplog.text


def test_rubbish_of_a_crash_while_removing_is_swept_by_the_next_start(run):
    train_on_ranks(run, steps=4, when=EACH)
    (run / "step-0000000001" / "manifest.json").unlink()
    listed = steps_of(run)

    first, _, _ = train_on_ranks(run, steps=5, when=EACH)

    assert listed == [2, 3]
    assert first == 4
    assert not (run / "step-0000000001").exists()


def pretend_room(monkeypatch, room_nbytes):
    monkeypatch.setattr(
        retention,
        "space_of",
        lambda *_: SimpleNamespace(room_nbytes=room_nbytes()),
    )


def test_where_nobody_counts_space_nothing_goes_for_it(run, monkeypatch):
    pretend_room(monkeypatch, lambda: None)

    train_on_ranks(run, steps=4, when=EACH, keep=9)

    assert steps_of(run) == [1, 2, 3]


def test_oldest_go_first_when_the_next_save_does_not_fit(run, monkeypatch):
    train_on_ranks(run, steps=5, when=EACH, keep=9)
    monkeypatch.setattr(retention, "_BESIDE_SHARDS_NBYTES", 0)
    pretend_room(monkeypatch, lambda: 0 if len(steps_of(run)) >= 5 else 1 << 40)

    train_on_ranks(run, steps=8, when=EACH, keep=9)

    assert steps_of(run) == [3, 4, 5, 6, 7]


def test_what_files_hold_besides_arrays_counts_when_room_is_made(run, monkeypatch):
    """Free are the bytes of the arrays, which is less than a checkpoint takes."""
    train_on_ranks(run, steps=5, when=EACH, keep=9)
    nbytes = mpickpt.read_manifest(mpickpt.latest(run)).nbytes
    rows = 12 * SIZE * 2 * 8
    assert nbytes > 2 * rows
    monkeypatch.setattr(retention, "_BESIDE_SHARDS_NBYTES", 0)
    pretend_room(monkeypatch, lambda: 2 * rows if len(steps_of(run)) >= 4 else 1 << 40)

    train_on_ranks(run, steps=6, when=EACH, keep=9)

    assert steps_of(run) == [2, 3, 4, 5]


def test_time_that_a_save_takes_is_no_time_of_training(run, monkeypatch):
    clock = {"s": 0.0}
    time_module = SimpleNamespace(monotonic=lambda: clock["s"])
    monkeypatch.setattr(watch, "time", time_module)
    monkeypatch.setattr(run_saver, "time", time_module)
    training = Training()

    def slow_state():
        clock["s"] += 1000.0
        return training.state()

    with mpickpt.CheckpointManager(
        run, state=slow_state, when=EveryMinutes(1), asynchronous=False
    ) as manager:
        for step in range(20):
            clock["s"] += 10.0
            training.train(step)
            manager.save_if_due(step)

    assert steps_of(run) == [6, 13]


# Damage, rewinds, attempts.


def test_run_heals_itself_past_a_damaged_checkpoint(run):
    options = {"when": EACH, "keep": 3}
    train_on_ranks(run, steps=5, **options)
    damage(run, 4)

    first, _, _ = train_on_ranks(run, steps=6, **options)
    again, _, _ = train_on_ranks(run, steps=7, **options)

    assert (first, again) == (4, 6)
    assert steps_of(run) == [4, 5, 6]
    assert [saved_step(path) for path in map_paths(run)] == [4, 5, 6]


def map_paths(run):
    return [entry.path for entry in mpickpt.checkpoints(run)]


def test_damaged_checkpoint_is_set_aside_with_what_is_wrong_with_it(run):
    train_on_ranks(run, steps=4, when=EACH)
    damage(run, 3)

    def restore(comm):
        with manager_of(run, comm, Training(comm)) as manager:
            return manager.restore_latest().rejected

    rejected = on_ranks(SIZE, restore)

    assert rejected[0] == rejected[1]
    assert list(rejected[0]) == [3]
    assert rejections(run) == {"step-0000000003": rejected[0][3]}
    assert "rank00001" in rejected[0][3]
    assert steps_of(run) == [1, 2]


def test_all_damaged_is_an_error_and_changes_nothing(run):
    train_on_ranks(run, steps=3, when=EACH)
    damage(run, 1)
    damage(run, 2)
    before = files_below(run)

    error = failure_on_ranks(SIZE, lambda comm: train(run, comm, steps=1))

    assert isinstance(error, mpickpt.IncompleteCheckpointError)
    assert "step 1" in str(error)
    assert "step 2" in str(error)
    assert {k for k in files_below(run) if k.startswith("step")} == {
        k for k in before if k.startswith("step")
    }


def test_rewind_holds_across_a_restart(run):
    train_on_ranks(run, steps=6, when=EACH)

    def rewind(comm):
        training = Training(comm)
        with manager_of(run, comm, training, when=EACH) as manager:
            manager.restore_latest()
            restored = manager.rewind(3)
            training.adopt(restored)
            training.require_step(3)
            return manager.next_step

    following = on_ranks(SIZE, rewind)
    first, _, _ = train_on_ranks(run, steps=6, when=EACH, keep=2)

    assert following == [4, 4]
    assert first == 4
    assert steps_of(run) == [4, 5]
    assert sorted(rejections(run)) == ["step-0000000004", "step-0000000005"]


def test_rewind_outlives_a_save_that_was_under_way(run):
    def rewind(comm):
        training = Training(comm)
        with manager_of(run, comm, training, progress="poll") as manager:
            for step in (1, 2, 3):
                training.train(step)
                manager.save(step)
            manager.rewind(1)
            manager.save(2)

    on_ranks(SIZE, rewind)

    assert steps_of(run) == [1, 2]


def test_restore_of_an_older_step_changes_nothing_until_the_next_save(run):
    train_on_ranks(run, steps=5, when=EACH)
    listed = []

    def restore(comm):
        training = Training(comm)
        with manager_of(run, comm, training) as manager:
            manager.restore(2)
            listed.append(manager.steps())
            manager.save(3)

    on_ranks(SIZE, restore)

    assert listed == [[1, 2, 3, 4]] * SIZE
    assert steps_of(run) == [1, 2, 3]


class Crash(RuntimeError):
    pass


def crash_after_restore(run, comm=None):
    with manager_of(run, comm, Training(comm)) as manager:
        restored = manager.restore_latest()
        raise Crash(restored.step)


def crashes(run, times):
    steps = []
    for _ in range(times):
        for outcome in run_ranks(SIZE, lambda comm: crash_after_restore(run, comm)):
            assert isinstance(outcome, Crash), outcome
        steps.append(outcome.args[0])
    return steps


def test_checkpoint_that_crashes_the_program_is_passed_over(run):
    train_on_ranks(run, steps=4, when=EACH)

    steps = crashes(run, 4)

    assert steps == [3, 3, 3, 2]
    assert "3 times" in rejections(run)["step-0000000003"]


def test_save_clears_the_attempts(run):
    train_on_ranks(run, steps=4, when=EACH)
    crashes(run, 2)

    train_on_ranks(run, steps=5, when=EACH)

    assert crashes(run, 3) == [4, 4, 4]


def crash_after_a_step(run, comm=None):
    with manager_of(run, comm, Training(comm)) as manager:
        restored = manager.restore_latest()
        manager.save_if_due(manager.next_step)
        raise Crash(restored.step)


def test_step_done_clears_the_attempts(run):
    train_on_ranks(run, steps=4, when=EACH)
    crashes(run, 2)

    for outcome in run_ranks(SIZE, lambda comm: crash_after_a_step(run, comm)):
        assert isinstance(outcome, Crash), outcome

    assert crashes(run, 3) == [3, 3, 3]


def test_restore_by_a_program_that_ends_well_is_no_attempt(run):
    train_on_ranks(run, steps=4, when=EACH)

    firsts = [train_on_ranks(run, steps=0)[0] for _ in range(5)]

    assert firsts == [4] * 5
    assert not list((run / ".mpickpt/attempts").iterdir())


def test_restore_that_is_refused_is_no_attempt(run):
    train_on_ranks(run, steps=4, when=EACH)

    for _ in range(4):
        error = failure_on_ranks(3, lambda comm: train(run, comm, steps=1))
        assert isinstance(error, mpickpt.WorldSizeMismatchError)

    assert train_on_ranks(run, steps=0)[0] == 4


# One writer.


def test_save_is_refused_on_all_ranks_while_another_job_writes(run, monkeypatch):
    monkeypatch.setattr(run_keeper, "LEASE_PATIENCE_S", 0.0)
    train_on_ranks(run, steps=2, when=EACH)

    with Lease.acquire(run, beat_s=0.1):
        error = failure_on_ranks(
            SIZE, lambda comm: train(run, comm, steps=4, when=EACH)
        )

    assert isinstance(error, mpickpt.LeaseHeldError)
    assert steps_of(run) == [1]


def test_evaluator_changes_nothing_while_another_job_writes(run):
    train_on_ranks(run, steps=4, when=EACH)
    damage(run, 3)

    with Lease.acquire(run, beat_s=0.1):
        before = files_below(run)
        first, _, _ = train_on_ranks(run, steps=0)
        after = files_below(run)

    assert first == 3
    assert after == before


@pytest.mark.parametrize("already", [0, 2])
def test_job_that_waited_for_another_sets_none_of_its_steps_aside(run, already):
    train(run, steps=already, when=EACH)
    late = manager_of(run, None, Training())
    late.restore_latest()

    train(run, steps=5, when=EACH)  # what another job does meanwhile, and ends

    with pytest.raises(mpickpt.LeaseHeldError, match="saved step 4"):
        late.save(late.next_step)
    late.close()
    assert max(steps_of(run)) == 4
    assert rejections(run) == {}


def test_writer_that_lost_its_lease_neither_publishes_nor_removes(run):
    def lose(comm):
        training = Training(comm)
        with manager_of(run, comm, training, keep=1, asynchronous=False) as manager:
            manager.save(1)
            if comm.rank == 0:
                (run / ".mpickpt/lease/0000000009.json").write_text("{}")
            manager.save(2)

    error = failure_on_ranks(SIZE, lose)

    assert isinstance(error, mpickpt.LeaseHeldError)
    assert steps_of(run) == [1]


# Stopping.


def stop_of(run, comm, ask, **options):
    """Train 30 steps; `ask` may ask for a stop at any; return where it stopped."""
    preemption = Preemption(install=False)
    first, last, code = train(
        run,
        comm,
        steps=30,
        each=lambda manager, step: ask(preemption, comm, step),
        preemption=preemption,
        **options,
    )
    assert first == 0
    return last, code


@pytest.mark.parametrize("rank", [0, 1])
def test_signal_on_one_rank_stops_all_at_the_same_step(run, rank):
    def ask(preemption, comm, step):
        if step in (5, 6) and comm.rank == rank:
            preemption.request()

    stops = on_ranks(SIZE, lambda comm: stop_of(run, comm, ask, when=EverySteps(20)))

    assert stops == [(6, 85)] * SIZE
    assert saved_step(mpickpt.latest(run)) == 6


def test_halt_file_stops_all_at_the_same_step_for_good(run, monkeypatch):
    monkeypatch.setattr("mpickpt.parallel.watch.HALT_LOOK_S", 0.0)

    def halt(_preemption, comm, step):
        if step == 4 and comm.rank == 0:
            HaltFile(run).write("enough")

    stops = on_ranks(SIZE, lambda comm: stop_of(run, comm, halt))

    assert stops == [(5, 0)] * SIZE
    assert steps_of(run) == [5]


def test_halt_file_that_cannot_be_looked_for_is_no_failure(run, monkeypatch):
    def refuse(_):
        raise StorageError("I/O error", path="halt", errno=errno.EIO)

    monkeypatch.setattr("mpickpt.parallel.watch.HALT_LOOK_S", 0.0)
    monkeypatch.setattr(HaltFile, "exists", property(refuse))

    assert train_on_ranks(run, steps=3, when=EACH) == (0, 2, 0)


def test_wall_time_that_runs_out_stops_all_ranks(run):
    def stop(comm):
        preemption = Preemption(install=False, end_time_s=time.time() + 1)
        return train(run, comm, steps=30, preemption=preemption)

    outcomes = on_ranks(SIZE, stop)

    assert outcomes == [(0, 1, 85)] * SIZE
    assert steps_of(run) == [1]


@pytest.mark.parametrize("asked_between", [True, False])
def test_two_streams_that_share_a_preemption_stop_at_the_same_step(
    tmp_path, asked_between
):
    def stop(comm):
        training, preemption = Training(comm), Preemption(install=False)
        with (
            manager_of(tmp_path / "a", comm, training, preemption=preemption) as a,
            manager_of(
                tmp_path / "b", comm, training, preemption=preemption, when=EACH
            ) as b,
        ):
            for step in range(20):
                training.train(step)
                if step == 4 and comm.rank == 1 and not asked_between:
                    preemption.request()
                a.save_if_due(step)
                if step == 4 and comm.rank == 1:
                    preemption.request()
                b.save_if_due(step)
                if a.should_stop or b.should_stop:
                    return step, a.should_stop, b.should_stop

    stops = on_ranks(SIZE, stop)

    expected = 6 if asked_between else 5
    assert stops == [(expected, True, True)] * SIZE
    assert steps_of(tmp_path / "a") == [expected]
    assert steps_of(tmp_path / "b")[-1] == expected


def test_failure_of_one_stream_is_raised_by_that_stream(tmp_path, monkeypatch):
    fail_writes(monkeypatch, "/a/step-0000000001/rank00001")

    def save(comm):
        training, told = Training(comm), []
        a = manager_of(tmp_path / "a", comm, training)
        b = manager_of(tmp_path / "b", comm, training)
        a.save(1)
        for stream in (b, a):
            try:
                stream.save(2)
            except mpickpt.StorageError as error:
                told.append((stream is a, error.rank))
        a.close()
        b.close()
        return told

    told = on_ranks(SIZE, save)

    assert told == [[(True, 1)]] * SIZE
    assert steps_of(tmp_path / "b") == [2]


# Failures and ends.


def fail_writes(monkeypatch, part, errno=28):
    from mpickpt.parallel import pending

    write = pending.write_staged_file

    def failing(path, *arguments):
        if part in str(path):
            raise mpickpt.StorageError("disk full", errno=errno, path=str(path))
        return write(path, *arguments)

    monkeypatch.setattr(pending, "write_staged_file", failing)


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_failure_in_the_background_is_raised_on_all_ranks_at_the_same_call(
    run, monkeypatch, progress
):
    fail_writes(monkeypatch, "step-0000000004/rank00001")
    calls = [0] * SIZE

    def count(comm):
        def each(_manager, _step):
            calls[comm.rank] += 1

        return train(
            run,
            comm,
            steps=50,
            when=EverySteps(2) if progress == "poll" else EverySteps(4),
            each=each,
            progress=progress,
        )

    error = failure_on_ranks(SIZE, count)

    assert isinstance(error, mpickpt.StorageError)
    assert (error.errno, error.rank) == (28, 1)
    assert calls[0] == calls[1]
    assert 4 not in steps_of(run)
    assert train_on_ranks(run, steps=0)[0] in (0, 3)


def test_program_that_takes_the_failure_goes_on_saving(run, monkeypatch):
    fail_writes(monkeypatch, "step-0000000001/rank00001")

    def go_on(comm):
        training, errors = Training(comm), []
        with manager_of(run, comm, training, when=EACH) as manager:
            for step in range(6):
                training.train(step)
                try:
                    manager.save_if_due(step)
                except mpickpt.StorageError:
                    errors.append(step)
        return errors

    errors = on_ranks(SIZE, go_on)

    assert errors[0] == errors[1]
    assert len(errors[0]) == 1
    assert steps_of(run)[-1] == 5


def test_preemption_after_a_failed_save_still_saves_and_stops(run, monkeypatch):
    fail_writes(monkeypatch, "step-0000000001/rank00001")

    def stop(comm):
        training, preemption = Training(comm), Preemption(install=False)
        with manager_of(run, comm, training, preemption=preemption) as manager:
            training.train(0)
            manager.save_if_due(0)
            manager.save(1)
            preemption.request()
            errors = 0
            for step in range(2, 9):
                training.train(step)
                try:
                    manager.save_if_due(step)
                except mpickpt.StorageError:
                    errors += 1
                if manager.should_stop:
                    return step, errors

    stops = on_ranks(SIZE, stop)

    assert stops[0] == stops[1]
    assert stops[0][1] == 1
    assert steps_of(run) == [stops[0][0]]


def test_close_raises_what_went_wrong_with_the_last_save(run, monkeypatch):
    fail_writes(monkeypatch, "step-0000000002/rank00001")

    error = failure_on_ranks(SIZE, lambda comm: train(run, comm, steps=3, when=EACH))

    assert isinstance(error, mpickpt.StorageError)
    assert steps_of(run) == [1]
    assert not (run / "step-0000000002").exists()


def test_close_twice_is_once(run):
    with manager_of(run, None, Training(), when=EACH) as manager:
        manager.save(1)
        manager.close()
        manager.close()

    assert steps_of(run) == [1]


def test_closed_manager_saves_no_more(run):
    manager = manager_of(run, None, Training(), when=EACH)
    manager.close()

    with pytest.raises(ValueError, match="closed"):
        manager.save(1)
    with pytest.raises(ValueError, match="closed"):
        manager.save_if_due(1)


def test_exception_after_close_takes_no_share_of_a_preemption_twice(run, tmp_path):
    preemption = Preemption(install=False)
    other = manager_of(tmp_path / "b", None, Training(), preemption=preemption)

    with (
        pytest.raises(Crash),
        manager_of(run, None, Training(), preemption=preemption) as manager,
    ):
        manager.close()
        raise Crash

    assert preemption._users == 1
    other.close()


def hold_writes(monkeypatch, part):
    """Have writes of some shards wait; return (begun, go on)."""
    from mpickpt.parallel import pending

    write, begun, go_on = (
        pending.write_staged_file,
        threading.Event(),
        threading.Event(),
    )

    def waiting(path, staged, style, cancelled):
        if part in str(path):
            begun.set()
            while not go_on.wait(0.005):
                if cancelled.is_set():
                    raise mpickpt.CheckpointError("cancelled")
        return write(path, staged, style, cancelled)

    monkeypatch.setattr(pending, "write_staged_file", waiting)
    return begun, go_on


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_exit_after_an_exception_is_local_and_leaves_the_save_unpublished(
    run, monkeypatch, progress
):
    hold_writes(monkeypatch, "step-0000000002")

    def crash(comm):
        training = Training(comm)
        with manager_of(run, comm, training, progress=progress) as manager:
            for step in (1, 2):
                training.train(step)
                manager.save(step)
            if comm.rank == 1:
                raise Crash

    begin = time.monotonic()
    outcomes = run_ranks(SIZE, crash, timeout_s=20.0)

    assert isinstance(outcomes[1], Crash)
    assert isinstance(outcomes[0], mpickpt.CollectiveTimeoutError)
    assert time.monotonic() - begin < 10
    assert steps_of(run) == [1]
    assert train_on_ranks(run, steps=0)[0] == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, Crash])
def test_exit_after_any_exception_lets_it_through_and_gives_the_lease_back(run, error):
    training = Training()
    training.train(1)
    with pytest.raises(error), manager_of(run, None, training, when=EACH) as manager:
        manager.save(1, wait=True)
        raise error

    begin = time.monotonic()
    train(run, None, steps=4, when=EACH)

    assert time.monotonic() - begin < 3
    assert steps_of(run) == [1, 2, 3]


# A save that comes while the one before is under way.


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_busy_save_is_skipped_on_all_ranks_when_one_still_writes(
    run, monkeypatch, progress
):
    _, go_on = hold_writes(monkeypatch, "step-0000000001/rank00001")

    def save(comm):
        training = Training(comm)
        options = {"progress": progress, "on_busy": "skip"}
        with manager_of(run, comm, training, **options) as manager:
            begun = [manager.save(1), manager.save(2)]
            go_on.set()
            manager.wait()
            begun.append(manager.save(3))
        return begun

    assert on_ranks(SIZE, save) == [[True, False, True]] * SIZE
    assert steps_of(run) == [1, 3]


def test_busy_save_is_an_error_on_all_ranks_when_asked_for(run, monkeypatch):
    _, go_on = hold_writes(monkeypatch, "step-0000000001/rank00001")

    def save(comm):
        with manager_of(run, comm, Training(comm), on_busy="error") as manager:
            manager.save(1)
            with pytest.raises(mpickpt.CheckpointError, match="under way"):
                manager.save(2)
            go_on.set()

    on_ranks(SIZE, save)

    assert steps_of(run) == [1]


def test_busy_save_waits_by_default(run, monkeypatch):
    begun, go_on = hold_writes(monkeypatch, "step-0000000001/rank00001")
    threading.Thread(target=lambda: (begun.wait(20), go_on.set()), daemon=True).start()

    def save(comm):
        with manager_of(run, comm, Training(comm)) as manager:
            manager.save(1)
            manager.save(2)
            return manager.steps()

    assert on_ranks(SIZE, save) == [[1], [1]]
    assert steps_of(run) == [1, 2]
