"""A run on several tiers: what is copied, what stays, where a start goes on from."""

import logging
import os
import shutil
import time

import pytest

import mpickpt
from mpickpt import (
    DirectoryTier,
    EverySteps,
    KeepEvery,
    LocalTier,
    ObjectTier,
    Preemption,
    StorageError,
)
from mpickpt.parallel import run_keeper, run_tiers
from mpickpt.parallel.run_restorer import RunRestorer
from mpickpt.storage import uploader as uploader_module
from mpickpt.storage.job_identity import JobIdentity
from mpickpt.storage.lease import Lease
from mpickpt.storage.upload import UploadRules
from tests.nodes_of_threads import NodesOfThreads
from tests.states import failure_on_ranks, on_ranks
from tests.stores_double import URL, memory_store
from tests.training import Training, manager_of, saved_step, train

EACH = EverySteps(1)


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    rules = UploadRules(first_pause_s=0.05, longest_pause_s=0.2, look_s=0.02)
    monkeypatch.setattr(uploader_module, "UploadRules", lambda: rules)


def steps_of(run):
    return [entry.step for entry in mpickpt.checkpoints(run)]


def train_on(ranks, tiers, *, steps, seat=lambda call: call, **options):
    options = {"when": EACH, "asynchronous": False} | options
    outcomes = on_ranks(
        ranks,
        seat(lambda comm: train(None, comm, tiers=tiers, steps=steps, **options)),
    )
    assert len(set(outcomes)) == 1, outcomes
    return outcomes[0]


# A shared directory first.


@pytest.mark.parametrize("asynchronous", [True, False])
def test_copies_come_to_each_tier_by_its_rules(tmp_path, asynchronous):
    near, far, seldom = (tmp_path / name for name in ("near", "far", "seldom"))
    tiers = [
        DirectoryTier(near, keep=2),
        DirectoryTier(far, keep=3),
        DirectoryTier(seldom, every=3, keep=KeepEvery(6)),
    ]

    train_on(2, tiers, steps=9, asynchronous=asynchronous)

    assert steps_of(near)[-2:] == [7, 8]  # one more where its copy was not done yet
    assert steps_of(far) == [6, 7, 8]
    assert steps_of(seldom) == [6]
    assert saved_step(mpickpt.latest(far)) == 8
    assert mpickpt.read_manifest(mpickpt.latest(far)).extra["tier"]["kind"] == (
        "directory"
    )


def test_counting_goes_on_over_starts(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [DirectoryTier(near), DirectoryTier(far, every=3)]

    train_on(2, tiers, steps=3)
    train_on(2, tiers, steps=7)

    assert steps_of(near) == [1, 2, 3, 4, 5, 6]
    assert steps_of(far) == [3, 6]


def test_start_goes_on_from_the_next_tier_when_the_first_is_gone(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [DirectoryTier(near, keep=2), DirectoryTier(far, keep=2)]
    train_on(2, tiers, steps=5)
    shutil.rmtree(near)

    first, last, _ = train_on(2, tiers, steps=7)

    assert (first, last) == (5, 6)
    assert steps_of(near) == [5, 6]
    assert steps_of(far) == [5, 6]


def test_damaged_checkpoint_comes_from_the_next_tier(tmp_path, caplog):
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [DirectoryTier(near), DirectoryTier(far)]
    train_on(2, tiers, steps=4)
    [shard, *_] = sorted((near / "step-0000000003").glob("rank*.h5"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    caplog.set_level(logging.WARNING)

    first, _, _ = train_on(2, tiers, steps=6)

    assert first == 4
    assert f"{near}/step-0000000003 is damaged" in caplog.text
    assert steps_of(near) == [1, 2, 4, 5]  # the damaged one is set aside
    assert steps_of(far) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("ranks", [2, 3])
def test_copy_that_a_start_did_not_finish_is_finished_by_the_next(tmp_path, ranks):
    near, far = tmp_path / "near", tmp_path / "far"
    train_on(2, [DirectoryTier(near)], steps=4)

    def resume(comm):
        training = Training(comm, rows=24 // ranks)
        tiers = [DirectoryTier(near), DirectoryTier(far)]
        with manager_of(None, comm, training, tiers=tiers) as manager:
            training.adopt(manager.restore_latest(reshard=True))
            training.train(4)
            manager.save(4, wait=True)

    on_ranks(ranks, resume)

    assert steps_of(far) == [3, 4]


def test_going_back_goes_for_all_tiers(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [DirectoryTier(near), DirectoryTier(far)]
    train_on(2, tiers, steps=6)

    def again(comm):
        training = Training(comm)
        with manager_of(None, comm, training, tiers=tiers) as manager:
            training.adopt(manager.rewind(2))
            training.train(3)
            manager.save(3, wait=True)
            manager.flush()

    on_ranks(2, again)

    assert steps_of(near) == steps_of(far) == [1, 2, 3]
    assert saved_step(mpickpt.latest(far)) == 3


def test_store_takes_copies_and_gives_them_back_to_other_ranks(tmp_path, monkeypatch):
    memory_store(monkeypatch)
    near = tmp_path / "near"
    tiers = [DirectoryTier(near, keep=1), ObjectTier(f"{URL}/run", keep=2)]
    train_on(4, tiers, steps=5)
    assert steps_of(f"{URL}/run") == [3, 4]
    shutil.rmtree(near)

    def resume(comm):
        training = Training(comm, rows=24)
        with manager_of(None, comm, training, tiers=tiers) as manager:
            restored = manager.restore_latest(reshard=True)
        return restored.step, restored.source, float(training.block.max())

    outcomes = on_ranks(2, resume)

    assert {outcome[:2] for outcome in outcomes} == {(4, f"{URL}/run/step-0000000004")}
    assert {int(outcome[2]) for outcome in outcomes} == {4}


def test_tier_that_refuses_holds_up_no_save_and_is_told_of(
    tmp_path, monkeypatch, caplog
):
    store = memory_store(monkeypatch)
    store.refuse = 5
    monkeypatch.setattr(run_tiers, "STALL_S", 0.2)
    near = tmp_path / "near"
    tiers = [DirectoryTier(near, keep=1), ObjectTier(f"{URL}/run")]

    def train_and_look(comm):
        training = Training(comm)
        with manager_of(
            None, comm, training, tiers=tiers, when=EACH, max_lag=1
        ) as manager:
            manager.restore_latest(required=False)
            for step in range(1, 6):
                training.train(step)
                manager.save(step, wait=True)
            left = manager.flush(timeout_s=0.3)
            comm.Ibarrier()
            store.refuse = None
            with pytest.raises(mpickpt.CheckpointError, match="step-00000000"):
                manager.flush(timeout_s=60)
            return left, manager.flush(timeout_s=60)

    outcomes = on_ranks(2, train_and_look)

    assert "saving goes on" in caplog.text
    assert set(outcomes) == {(False, True)}
    # Two that wait are kept for it; older ones had to make room, which is told.
    assert steps_of(f"{URL}/run") == [4, 5]


@pytest.mark.parametrize("ending", ["flush", "close"])
def test_tier_that_only_refuses_is_not_waited_for_without_end(
    tmp_path, monkeypatch, ending
):
    memory_store(monkeypatch).refuse = 5
    monkeypatch.setattr(run_tiers, "STALL_S", 0.3)
    tiers = [DirectoryTier(tmp_path / "near"), ObjectTier(f"{URL}/run")]

    def train_and_end(comm):
        training = Training(comm)
        with manager_of(None, comm, training, tiers=tiers) as manager:
            training.train(1)
            manager.save(1, wait=True)
            getattr(manager, ending)()

    failure = failure_on_ranks(2, train_and_end)

    assert isinstance(failure, StorageError)
    assert URL in str(failure)
    assert steps_of(tmp_path / "near") == [1]


def test_newer_steps_of_a_tier_that_did_not_answer_are_not_given_up(
    tmp_path, monkeypatch
):
    store = memory_store(monkeypatch)
    near = tmp_path / "near"
    tiers = [DirectoryTier(near), ObjectTier(f"{URL}/run")]
    train_on(2, tiers, steps=6)
    for step in (2, 3, 4, 5):
        shutil.rmtree(mpickpt.step_path(near, step))
    store.refuse = 5
    restoring = RunRestorer.newest

    def newest(self, required, **options):
        restored = restoring(self, required, **options)
        store.refuse = None
        return restored

    monkeypatch.setattr(RunRestorer, "newest", newest)

    def train_one_step(comm):
        training = Training(comm)
        with manager_of(None, comm, training, tiers=tiers) as manager:
            training.adopt(manager.restore_latest())
            comm.Ibarrier()
            training.train(2)
            manager.save(2, wait=True)
            with pytest.raises(mpickpt.CheckpointExistsError):
                manager.flush()
        return training.step

    on_ranks(2, train_one_step)

    assert steps_of(f"{URL}/run") == [1, 2, 3, 4, 5]


def test_tier_that_refuses_does_not_hide_the_next(tmp_path, monkeypatch):
    store = memory_store(monkeypatch)
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [DirectoryTier(near), ObjectTier(f"{URL}/run"), DirectoryTier(far)]
    train_on(2, tiers, steps=3)
    shutil.rmtree(near)
    store.refuse = 5

    def resume(comm):
        training = Training(comm)
        with manager_of(None, comm, training, tiers=tiers) as manager:
            return manager.restore_latest().step

    assert set(on_ranks(2, resume)) == {2}


@pytest.mark.parametrize("is_damaged", [True, False])
def test_older_checkpoint_is_not_restored_while_a_tier_cannot_be_asked(
    tmp_path, monkeypatch, is_damaged
):
    store = memory_store(monkeypatch)
    near = tmp_path / "near"
    tiers = [DirectoryTier(near), ObjectTier(f"{URL}/run")]
    train_on(2, tiers, steps=4)
    if is_damaged:
        for shard in mpickpt.step_path(near, 3).glob("rank*.h5"):
            shard.write_bytes(b"")
    else:
        shutil.rmtree(near)
    store.refuse = 5

    failure = failure_on_ranks(2, lambda comm: train(None, comm, tiers=tiers, steps=5))

    assert isinstance(failure, StorageError)
    assert "cannot be asked" in str(failure)
    store.refuse = None
    assert steps_of(f"{URL}/run") == [1, 2, 3]


def test_failed_copy_is_raised_on_all_ranks_when_it_is_asked_for(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [DirectoryTier(near), DirectoryTier(far)]

    # Another run has a checkpoint of this step there.
    mpickpt.save_sharded({"x": 1}, mpickpt.step_path(far, 1), step=1)

    def train_and_flush(comm):
        training = Training(comm)
        with manager_of(None, comm, training, tiers=tiers) as manager:
            training.train(1)
            manager.save(1, wait=True)
            manager.flush()

    failure = failure_on_ranks(2, train_and_flush)

    assert isinstance(failure, mpickpt.CheckpointExistsError)
    assert str(far) in str(failure)


def test_preempted_run_leaves_a_tier_that_only_refuses_and_is_requeued(
    tmp_path, monkeypatch, caplog
):
    memory_store(monkeypatch).refuse = 5
    monkeypatch.setattr(run_tiers, "STALL_S", 0.3)
    tiers = [DirectoryTier(tmp_path / "near"), ObjectTier(f"{URL}/run")]

    def train_and_be_preempted(comm):
        training = Training(comm)
        preemption = Preemption(install=False)
        with manager_of(
            None, comm, training, tiers=tiers, preemption=preemption
        ) as manager:
            preemption.request()
            for step in range(1, 4):
                training.train(step)
                if manager.save_if_due(step):
                    break
        return manager.exit_code

    assert on_ranks(2, train_and_be_preempted) == [85, 85]
    assert "mpickpt flush goes on" in caplog.text
    assert len(steps_of(tmp_path / "near")) == 1


def test_copy_that_failed_long_before_the_end_is_raised_at_it(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    mpickpt.save_sharded({"x": 1}, mpickpt.step_path(far, 1), step=1)

    def train_to_the_end(comm):
        training = Training(comm)
        tiers = [DirectoryTier(near), DirectoryTier(far)]
        with manager_of(None, comm, training, tiers=tiers) as manager:
            training.train(1)
            manager.save(1, wait=True)
            while manager._tiers._uploader.lag:
                time.sleep(0.01)

    failure = failure_on_ranks(2, train_to_the_end)

    assert isinstance(failure, mpickpt.CheckpointExistsError)


def test_full_tier_is_waited_for_once(tmp_path, monkeypatch):
    """Each try moves some bytes anew before the disk is full: that is no progress."""
    store = memory_store(monkeypatch)
    put = type(store).upload

    def full(self, name, source, *, progress=None, **options):
        if progress is not None:
            progress(options["nbytes"] // 2)
            progress(-(options["nbytes"] // 2))
        raise StorageError("no space", errno=28, path=name)

    monkeypatch.setattr(type(store), "upload", full)
    monkeypatch.setattr(run_tiers, "STALL_S", 0.3)
    near = tmp_path / "near"
    tiers = [DirectoryTier(near, keep=1), ObjectTier(f"{URL}/run")]

    def train_on_and_on(comm):
        training = Training(comm)
        waits = []
        with manager_of(
            None, comm, training, tiers=tiers, when=EACH, max_lag=1
        ) as manager:
            for step in range(1, 8):
                training.train(step)
                begin_s = time.monotonic()
                manager.save(step, wait=True)
                waits.append(time.monotonic() - begin_s > 0.25)
            monkeypatch.setattr(type(store), "upload", put)
            with pytest.raises(mpickpt.CheckpointError):
                manager.flush(timeout_s=60)
            manager.flush(timeout_s=60)
        return waits

    outcomes = on_ranks(2, train_on_and_on)

    assert sum(outcomes[0]) == 1


def test_another_job_that_copies_to_a_tier_keeps_this_one_out(tmp_path, monkeypatch):
    monkeypatch.setattr(run_keeper, "LEASE_PATIENCE_S", 0.2)
    near, far = tmp_path / "near", tmp_path / "far"
    other = JobIdentity(
        job="other", restart_count=0, host="n9", machine="m9", pid=7, started=1
    )

    def save(comm):
        training = Training(comm)
        tiers = [DirectoryTier(near), DirectoryTier(far)]
        with manager_of(None, comm, training, tiers=tiers) as manager:
            training.train(1)
            manager.save(1, wait=True)

    with Lease.acquire(far, other, beat_s=0.1):
        failure = failure_on_ranks(2, save)

    assert isinstance(failure, mpickpt.LeaseHeldError)
    assert str(far) in str(failure)
    assert steps_of(near) == []

    on_ranks(2, save)

    assert steps_of(far) == [1]


# The disk of each node first.


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    return NodesOfThreads(monkeypatch, tmp_path / "nodes")


def sat(nodes, names):
    return lambda call: nodes.seat(names, call)


def test_lost_node_is_made_good_by_partner_copies(nodes):
    tiers = [LocalTier(nodes.template, keep=2, copies=1)]
    train_on(4, tiers, steps=5, seat=sat(nodes, "aabb"))
    assert steps_of(nodes.run_on("a")) == steps_of(nodes.run_on("b")) == [3, 4]
    shutil.rmtree(nodes.run_on("a").parent)

    first, last, _ = train_on(4, tiers, steps=7, seat=sat(nodes, "ccbb"))

    assert (first, last) == (5, 6)
    assert steps_of(nodes.run_on("c")) == steps_of(nodes.run_on("b")) == [5, 6]


def test_lost_node_without_copies_costs_one_tier(nodes, tmp_path):
    far = tmp_path / "far"
    tiers = [LocalTier(nodes.template, keep=2), DirectoryTier(far, keep=2)]
    train_on(4, tiers, steps=5, seat=sat(nodes, "aabb"))
    assert steps_of(far) == [3, 4]
    shutil.rmtree(nodes.run_on("a").parent)

    def resume(comm):
        training = Training(comm)
        with manager_of(None, comm, training, tiers=tiers) as manager:
            restored = manager.restore_latest()
            training.adopt(restored)
            training.require_step(4)
        return restored.source

    [source, *others] = on_ranks(4, nodes.seat("ccbb", resume))

    assert "2 shards from this node" in source or "from" in source
    assert str(far) in source
    assert set(others) == {source}


def test_going_back_goes_for_all_nodes(nodes):
    tiers = [LocalTier(nodes.template, keep=None)]
    train_on(2, tiers, steps=5, seat=sat(nodes, "ab"))

    def again(comm):
        training = Training(comm)
        with manager_of(None, comm, training, tiers=tiers) as manager:
            training.adopt(manager.rewind(2))
            training.train(3)
            manager.save(3, wait=True)

    on_ranks(2, nodes.seat("ab", again))

    for name in "ab":
        assert steps_of(nodes.run_on(name)) == [1, 2, 3]


# Bad arguments.


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, TypeError, "give a run directory, or tiers"),
        ({"run_dir": "x", "tiers": [DirectoryTier("y")]}, TypeError, "not both"),
        ({"tiers": [DirectoryTier("y")], "keep": 3}, TypeError, "each tier"),
        ({"tiers": []}, ValueError, "empty"),
        ({"tiers": ["x"]}, TypeError, "no tier"),
        ({"tiers": [ObjectTier("s3://b/r")]}, ValueError, "a save writes files"),
        (
            {"tiers": [DirectoryTier("x"), DirectoryTier("./x/")]},
            ValueError,
            "two tiers",
        ),
        (
            {"tiers": [DirectoryTier("x"), LocalTier("y")]},
            ValueError,
            "first tier only",
        ),
        ({"tiers": [DirectoryTier("x")], "max_lag": 0}, ValueError, "max_lag"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        mpickpt.CheckpointManager(state=dict, **arguments)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: LocalTier("x", copies=2), ValueError),
        (lambda: LocalTier(""), TypeError),
        (lambda: DirectoryTier("x", every=0), ValueError),
        (lambda: DirectoryTier("x", every="2"), TypeError),
        (lambda: DirectoryTier("x", keep=0), ValueError),
        (lambda: DirectoryTier("x", bandwidth="fast"), ValueError),
        (lambda: DirectoryTier("x", bandwidth=0), ValueError),
        (lambda: ObjectTier("bucket/run"), ValueError),
        (lambda: ObjectTier("s3://"), ValueError),
        (lambda: ObjectTier("memory://bucket/run"), ValueError),
    ],
)
def test_tiers_that_make_no_sense_are_refused(make, error):
    with pytest.raises(error):
        make()


def test_storage_error_is_what_a_missing_variable_is_not():
    with pytest.raises((ValueError, StorageError)):
        mpickpt.CheckpointManager(state=dict, tiers=[LocalTier("$NO_SUCH_DISK/run")])


def test_store_is_no_place_for_a_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(StorageError, match="tiers="):
        mpickpt.save_sharded({"x": 1}, "s3://bucket/run/step-0000000001", step=1)
    with pytest.raises(StorageError, match="tiers="):
        mpickpt.CheckpointManager("s3://bucket/run", state=dict)

    assert not list(tmp_path.iterdir())
