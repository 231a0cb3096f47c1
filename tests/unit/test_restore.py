"""Which checkpoint a start goes on from, when some of them cannot be used."""

import errno
import shutil

import pytest

import mpickpt
from mpickpt import EverySteps
from mpickpt.parallel import restore as restore_module
from mpickpt.parallel.load import Load
from mpickpt.storage.run_directory import RunDirectory
from tests.ranks_as_threads import run_ranks
from tests.states import failure_on_ranks, on_ranks
from tests.training import ROWS, Training, manager_of, train

SIZE = 2
EACH = EverySteps(1)


@pytest.fixture
def run(tmp_path):
    """A run with steps 1 to 4."""
    path = tmp_path / "run"
    on_ranks(SIZE, lambda comm: train(path, comm, steps=5, when=EACH))
    return path


def restore(run, comm, rows=ROWS, **options):
    training = Training(comm, rows)
    with manager_of(run, comm, training) as manager:
        restored = manager.restore_latest(**options)
        training.adopt(restored)
        return restored.step, sorted(restored.rejected), training


def restored_step(run, size=SIZE, rows=ROWS, **options):
    outcomes = on_ranks(size, lambda comm: restore(run, comm, rows, **options)[:2])
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def shard_of(run, step, rank=1):
    path = mpickpt.step_path(run, step)
    return path / mpickpt.read_manifest(path).shards[rank].path


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def drop_layout(run, step):
    (layout,) = mpickpt.step_path(run, step).glob("layout-*.h5")
    layout.unlink()


DAMAGES = {
    "flipped byte": lambda run: flip(shard_of(run, 4)),
    "missing shard": lambda run: shard_of(run, 4).unlink(),
    "short shard": lambda run: shard_of(run, 4).write_bytes(b"short"),
    "flipped manifest": lambda run: flip(mpickpt.step_path(run, 4) / "manifest.json"),
    "empty manifest": lambda run: (
        mpickpt.step_path(run, 4) / "manifest.json"
    ).write_bytes(b""),
    "missing layout": lambda run: drop_layout(run, 4),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_passed_over(run, damage):
    DAMAGES[damage](run)

    assert restored_step(run) == (3, [4])
    assert [entry.step for entry in mpickpt.checkpoints(run)] == [1, 2, 3]


@pytest.mark.parametrize("verify", ["sha256", "crc32"])
def test_damage_is_found_by_each_way_to_verify(run, verify):
    flip(shard_of(run, 4))

    assert restored_step(run, verify=verify) == (3, [4])


def test_several_damaged_ones_are_passed_over(run):
    flip(shard_of(run, 4))
    shard_of(run, 3, rank=0).unlink()

    assert restored_step(run) == (2, [3, 4])


def test_damaged_checkpoint_is_passed_over_while_resharding(run):
    flip(shard_of(run, 4))

    assert restored_step(run, size=3, rows=ROWS * SIZE // 3, reshard=True)[0] == 3


def test_state_is_that_of_the_older_checkpoint_byte_for_byte(run):
    flip(shard_of(run, 4))

    for step, _, training in on_ranks(SIZE, lambda comm: restore(run, comm)):
        training.require_step(step)


def test_removed_manifest_is_no_checkpoint(run):
    (mpickpt.step_path(run, 4) / "manifest.json").unlink()

    assert restored_step(run) == (3, [])


def test_state_of_another_shape_is_an_error_and_sets_nothing_aside(run):
    error = failure_on_ranks(SIZE, lambda comm: restore(run, comm, rows=ROWS + 1))

    assert isinstance(error, mpickpt.LayoutError)
    assert [entry.step for entry in mpickpt.checkpoints(run)] == [1, 2, 3, 4]


def test_file_system_that_refuses_is_an_error_and_sets_nothing_aside(run, monkeypatch):
    def refuse(*_arguments):
        raise mpickpt.StorageError("I/O error", errno=errno.EIO)

    monkeypatch.setattr(Load, "read_indexes", refuse)

    error = failure_on_ranks(SIZE, lambda comm: restore(run, comm))

    assert isinstance(error, mpickpt.StorageError)
    assert [entry.step for entry in mpickpt.checkpoints(run)] == [1, 2, 3, 4]


def test_checkpoint_that_is_removed_while_it_is_looked_at_is_no_damage(
    run, monkeypatch
):
    newest_first = restore_module._newest_first

    def remove_after_listing(keeper, others):
        listed = newest_first(keeper, others)
        shutil.rmtree(mpickpt.step_path(run, 4), ignore_errors=True)
        return listed

    monkeypatch.setattr(restore_module, "_newest_first", remove_after_listing)

    assert restored_step(run) == (3, [])


def test_pinned_checkpoint_that_is_damaged_stays_pinned_aside(run):
    RunDirectory(run).pin(4)
    flip(shard_of(run, 4))

    restored_step(run)

    (aside,) = RunDirectory(run).rejected()
    assert (aside.step, aside.is_pinned) == (4, True)


def test_missing_step_is_not_found_on_all_ranks(run):
    def restore_step(comm):
        with manager_of(run, comm, Training(comm)) as manager:
            manager.restore(7)

    error = failure_on_ranks(SIZE, restore_step)

    assert isinstance(error, mpickpt.CheckpointNotFoundError)
    assert "step-0000000007" in str(error)


def test_different_steps_on_ranks_are_an_error_on_all(run):
    def restore_step(comm):
        with manager_of(run, comm, Training(comm)) as manager:
            manager.restore(1 + comm.rank)

    error = failure_on_ranks(SIZE, restore_step)

    assert isinstance(error, mpickpt.CallMismatchError)


def test_restore_of_a_directory_that_may_only_be_read_works(run, monkeypatch):
    def refuse(*_arguments, **_options):
        raise mpickpt.StorageError("read-only", errno=errno.EROFS)

    flip(shard_of(run, 4))
    monkeypatch.setattr("mpickpt.storage.run_directory.replace_document", refuse)
    monkeypatch.setattr("mpickpt.storage.lease.create_file", refuse)

    assert restored_step(run) == (3, [4])
    assert [entry.step for entry in mpickpt.checkpoints(run)] == [1, 2, 3, 4]


def test_unverified_load_is_not_called_good(run):
    def restore_without(comm):
        with manager_of(run, comm, Training(comm)) as manager:
            manager.restore_latest(verify="none")
            return sorted(manager._keeper.retention.good)

    assert on_ranks(SIZE, restore_without) == [[], []]


def test_rank_that_stays_away_is_named(run):
    def stay_away(comm):
        options = mpickpt.SaveOptions(timeout_s=0.5)
        with manager_of(run, comm, Training(comm), options=options) as manager:
            if comm.rank == 0:
                manager.restore_latest()

    outcomes = run_ranks(SIZE, stay_away)

    assert isinstance(outcomes[0], mpickpt.CollectiveTimeoutError)
    assert outcomes[0].missing_ranks == [1]


@pytest.mark.parametrize("name", ["manifest.json", "shard"])
def test_what_is_no_file_is_passed_over(run, name):
    path = shard_of(run, 4) if name == "shard" else mpickpt.step_path(run, 4) / name
    path.unlink()
    path.mkdir()

    assert restored_step(run) == (3, [4])


def test_checkpoint_in_the_directory_of_another_step_is_passed_over(run):
    shutil.copytree(mpickpt.step_path(run, 1), mpickpt.step_path(run, 9))

    assert restored_step(run) == (4, [9])
    assert [entry.step for entry in mpickpt.checkpoints(run)] == [1, 2, 3, 4]
