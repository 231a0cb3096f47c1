"""Copies in the background: retried, counted, never lost, and no burden to a save."""

import errno
import os
import shutil
import threading
import time

import pytest

import mpickpt
from mpickpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    StorageError,
)
from mpickpt.planning.pace_of_bytes import BytePace
from mpickpt.storage.copy_to_directory import DirectoryTarget
from mpickpt.storage.uploader import Uploader, UploadRules, UploadTarget
from tests.unit.copies import ALL, require_copy_of, require_unpublished
from tests.unit.saved_checkpoint import save

NAME = "step-0000000007"
RULES = UploadRules(first_pause_s=0.01, longest_pause_s=0.05, look_s=0.01, others_s=20)
SOON_S = 20.0


@pytest.fixture
def manifest(saved):
    return mpickpt.read_manifest(saved)


@pytest.fixture
def uploader_of():
    made = []

    def make(*runs, rules=RULES, **options):
        targets = [
            r if isinstance(r, UploadTarget) else UploadTarget(run=r) for r in runs
        ]
        made.append(Uploader(targets, rules=rules, **options))
        return made[-1]

    yield make
    for uploader in made:
        uploader.close(drain=False)


class Refusals:
    """Has the target refuse the first files that it is given."""

    def __init__(self, monkeypatch, error, count=10**9):
        self.left = count
        take = DirectoryTarget.take

        def refuse(target, record, source, control, **options):
            if self.left:
                self.left -= 1
                raise error
            take(target, record, source, control, **options)

        monkeypatch.setattr(DirectoryTarget, "take", refuse)


def busy():
    return StorageError("the target is busy", errno=errno.EIO, path="target")


def phases(uploader):
    return [state.phase for state in uploader.states()]


def test_checkpoint_is_copied_to_every_target(saved, manifest, tmp_path, uploader_of):
    published = []
    uploader = uploader_of(
        tmp_path / "a",
        tmp_path / "b",
        on_published=lambda target, m: published.append((target.run.name, m.step)),
    )

    uploader.submit(manifest, saved, ALL, publishes=True)

    assert uploader.wait(SOON_S)
    for run in ("a", "b"):
        require_copy_of(saved, tmp_path / run / NAME)
    assert sorted(published) == [("a", 7), ("b", 7)]
    assert phases(uploader) == ["done", "done"]
    assert all(s.nbytes_done == s.nbytes for s in uploader.states())
    assert (uploader.lag, uploader.holds(), uploader.errors()) == (0, set(), [])


def test_targets_can_be_chosen_for_each_checkpoint(
    saved, manifest, tmp_path, uploader_of
):
    uploader = uploader_of(tmp_path / "a", tmp_path / "b")

    uploader.submit(manifest, saved, ALL, publishes=True, to=uploader.targets[1:])

    assert uploader.wait(SOON_S)
    assert not (tmp_path / "a").exists()
    require_copy_of(saved, tmp_path / "b" / NAME)


def test_kind_of_the_target_stands_in_the_manifest(
    saved, manifest, tmp_path, uploader_of
):
    uploader = uploader_of(UploadTarget(run=tmp_path / "a", kind="local"))

    uploader.submit(manifest, saved, ALL, publishes=True)
    uploader.wait(SOON_S)

    tier = mpickpt.read_manifest(tmp_path / "a" / NAME).extra["tier"]
    assert tier["kind"] == "local"


def test_publishing_rank_waits_for_the_shards_of_others(
    saved, manifest, tmp_path, uploader_of
):
    ranks = [uploader_of(tmp_path / "a") for _ in ALL]

    for rank in reversed(ALL):
        require_unpublished(tmp_path / "a" / NAME)
        ranks[rank].submit(manifest, saved, [rank], publishes=rank == 3)
        if rank != 3:
            assert ranks[rank].wait(SOON_S)

    assert ranks[3].wait(SOON_S)
    require_copy_of(saved, tmp_path / "a" / NAME)


def test_ranks_that_do_not_come_are_named(saved, manifest, tmp_path, uploader_of):
    rules = UploadRules(look_s=0.01, others_s=0.1)
    uploader = uploader_of(tmp_path / "a", rules=rules)

    uploader.submit(manifest, saved, [0, 1], publishes=True)

    assert uploader.wait(SOON_S)
    [failed] = uploader.errors()
    assert isinstance(failed.error, IncompleteCheckpointError)
    assert "ranks 2, 3" in str(failed.error)
    assert "mpickpt flush" in str(failed.error)
    require_unpublished(tmp_path / "a" / NAME)


def test_others_are_waited_for_as_long_as_they_come(
    saved, manifest, tmp_path, uploader_of
):
    rules = UploadRules(look_s=0.01, others_s=4.0)
    uploader = uploader_of(tmp_path / "a", rules=rules)
    other = uploader_of(tmp_path / "a")
    uploader.submit(manifest, saved, [0], publishes=True)

    for rank in (1, 2, 3):
        time.sleep(1.5)
        other.submit(manifest, saved, [rank], publishes=False)

    assert uploader.wait(SOON_S)
    assert uploader.errors() == []
    require_copy_of(saved, tmp_path / "a" / NAME)


def test_target_that_fails_twice_is_tried_a_third_time(
    saved, manifest, tmp_path, uploader_of, monkeypatch
):
    refusals = Refusals(monkeypatch, busy(), count=2)
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, saved, ALL, publishes=True)

    assert uploader.wait(SOON_S)
    [state] = uploader.states()
    assert (state.phase, state.n_tries, state.error) == ("done", 3, None)
    assert uploader.errors() == []
    assert refusals.left == 0
    require_copy_of(saved, tmp_path / "a" / NAME)


def test_failure_of_a_target_is_seen_while_it_is_tried_again(
    saved, manifest, tmp_path, uploader_of, monkeypatch, caplog
):
    Refusals(monkeypatch, busy())
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, saved, ALL, publishes=True)
    while not (state := uploader.states()[0]).n_tries > 5:
        time.sleep(0.01)

    assert "busy" in str(state.error)
    assert uploader.errors() == []
    assert uploader.holds() == {7}
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert 2 <= len(warnings) <= 4  # at the 1st, 2nd and 4th
    [left] = uploader.close(drain=False)
    assert left.step == 7


@pytest.mark.parametrize("damage", ["content", "missing"])
def test_damaged_source_is_not_tried_again(
    copied, manifest, tmp_path, uploader_of, damage
):
    path = copied / manifest.shards[1].path
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(bytes(len(path.read_bytes())))
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, copied, ALL, publishes=True)

    assert uploader.wait(SOON_S)
    [failed] = uploader.errors()
    assert isinstance(failed.error, CorruptShardError | IncompleteCheckpointError)
    assert failed.error.path == str(path)
    assert (failed.phase, failed.n_tries) == ("failed", 1)
    require_unpublished(tmp_path / "a" / NAME)


def test_source_that_was_removed_is_not_tried_again(
    copied, manifest, tmp_path, uploader_of
):
    shutil.rmtree(copied)
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, copied, ALL, publishes=True)

    assert uploader.wait(SOON_S)
    [failed] = uploader.errors()
    assert isinstance(failed.error, CheckpointNotFoundError)


def test_disk_that_cannot_read_its_shards_is_given_up(
    saved, manifest, tmp_path, uploader_of, monkeypatch
):
    path = str(saved / manifest.shards[0].path)
    Refusals(monkeypatch, StorageError("cannot read", errno=errno.EIO, path=path))
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, saved, ALL, publishes=True)

    assert uploader.wait(SOON_S)
    [failed] = uploader.errors()
    assert failed.n_tries == 5


def test_another_checkpoint_in_the_target_is_an_error(
    saved, manifest, tmp_path, uploader_of
):
    save(tmp_path / "a" / NAME)
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, saved, ALL, publishes=True)

    assert uploader.wait(SOON_S)
    [failed] = uploader.errors()
    assert isinstance(failed.error, CheckpointExistsError)


def test_errors_are_kept_until_they_are_taken(copied, manifest, tmp_path, uploader_of):
    (copied / manifest.shards[1].path).unlink()
    runs = [tmp_path / f"run{n}" for n in range(30)]
    uploader = uploader_of(*runs)

    uploader.submit(manifest, copied, ALL, publishes=True)
    uploader.wait(SOON_S)

    assert len(uploader.errors()) == 30
    assert uploader.errors() == []


def test_error_nobody_thought_of_ends_one_copy_alone(
    saved, manifest, tmp_path, uploader_of, monkeypatch
):
    Refusals(monkeypatch, MemoryError("no room"), count=1)
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, saved, ALL, publishes=True)
    uploader.wait(SOON_S)
    uploader.submit(manifest, saved, ALL, publishes=True)
    uploader.wait(SOON_S)

    [failed] = uploader.errors()
    assert isinstance(failed.error.__cause__, MemoryError)
    require_copy_of(saved, tmp_path / "a" / NAME)


def test_what_fails_after_the_publishing_is_an_error(
    saved, manifest, tmp_path, uploader_of
):
    def fail(target, manifest):
        raise busy()

    uploader = uploader_of(tmp_path / "a", on_published=fail)

    uploader.submit(manifest, saved, ALL, publishes=True)

    assert uploader.wait(SOON_S)
    [failed] = uploader.errors()
    assert "busy" in str(failed.error)
    require_copy_of(saved, tmp_path / "a" / NAME)


def test_copy_that_was_taken_away_meanwhile_is_made_again(
    saved, manifest, tmp_path, uploader_of
):
    first, other = uploader_of(tmp_path / "a"), uploader_of(tmp_path / "a")
    first.submit(manifest, saved, [0, 1], publishes=True)
    while phases(first) != ["publishing"]:
        time.sleep(0.01)

    shutil.rmtree(tmp_path / "a" / NAME)
    other.submit(manifest, saved, [2, 3], publishes=False)

    assert first.wait(SOON_S)
    require_copy_of(saved, tmp_path / "a" / NAME)


def steps_of(run_dir, steps):
    for step in steps:
        save_path = mpickpt.step_path(run_dir, step)
        mpickpt.save_sharded({"x": bytes(50_000)}, save_path, step=step)
        yield mpickpt.read_manifest(save_path), save_path


def test_slow_target_lags_and_does_not_hold_up_another(tmp_path, uploader_of):
    slow = UploadTarget(run=tmp_path / "slow", pace=BytePace(1000.0))
    fast = UploadTarget(run=tmp_path / "fast")
    uploader = uploader_of(slow, fast)

    for manifest, path in steps_of(tmp_path / "run", range(4)):
        uploader.submit(manifest, path, [0], publishes=True)
    while len(mpickpt.checkpoints(tmp_path / "fast")) < 4:
        time.sleep(0.01)

    assert uploader.lag >= 3
    assert {1, 2, 3} <= uploader.holds()
    assert not uploader.wait(0.1, lag=2)
    assert uploader.wait(0.1, lag=4)
    assert uploader.estimate_s() > 10.0
    left = uploader.close(drain=False)
    assert {state.target for state in left} == {slow}


def test_max_lag_can_be_waited_for(tmp_path, uploader_of):
    uploader = uploader_of(UploadTarget(run=tmp_path / "to", pace=BytePace(400e3)))
    seen = []

    for manifest, path in steps_of(tmp_path / "run", range(5)):
        assert uploader.wait(SOON_S, lag=1)
        uploader.submit(manifest, path, [0], publishes=True)
        seen.append(uploader.lag)

    assert max(seen) <= 2
    assert uploader.close(drain=True) == []
    assert len(mpickpt.checkpoints(tmp_path / "to")) == 5


def test_estimate_is_none_while_nothing_is_known(
    saved, manifest, tmp_path, uploader_of, monkeypatch
):
    Refusals(monkeypatch, busy())
    uploader = uploader_of(tmp_path / "a")
    before = uploader.estimate_s()

    uploader.submit(manifest, saved, ALL, publishes=True)

    assert (before, uploader.estimate_s()) == (0.0, None)


def test_what_is_left_can_be_gone_on_with(saved, manifest, tmp_path, uploader_of):
    total = manifest.nbytes
    slow = UploadTarget(run=tmp_path / "a", pace=BytePace(total / 4))
    first = uploader_of(slow)
    first.submit(manifest, saved, ALL, publishes=True)
    while not first.states()[0].nbytes_done > total / 4:
        time.sleep(0.01)

    begin_s = time.monotonic()
    [left] = first.close(drain=False)
    seconds = time.monotonic() - begin_s
    second = uploader_of(tmp_path / "a")
    second.submit(manifest, saved, ALL, publishes=True)

    assert seconds < 2.0
    assert left.phase != "done"
    assert second.close(drain=True) == []
    require_copy_of(saved, tmp_path / "a" / NAME)


def test_draining_ends_at_its_deadline(saved, manifest, tmp_path, uploader_of):
    slow = UploadTarget(run=tmp_path / "a", pace=BytePace(1000.0))
    uploader = uploader_of(slow)
    uploader.submit(manifest, saved, ALL, publishes=True)

    begin_s = time.monotonic()
    left = uploader.close(drain=True, deadline_s=0.3)

    assert 0.3 <= time.monotonic() - begin_s < 5.0
    assert [state.step for state in left] == [7]


def test_draining_gives_up_a_target_that_takes_nothing(
    saved, manifest, tmp_path, uploader_of, monkeypatch
):
    Refusals(monkeypatch, busy())
    rules = UploadRules(first_pause_s=0.01, longest_pause_s=0.02, others_s=0.2)
    uploader = uploader_of(tmp_path / "a", rules=rules)
    uploader.submit(manifest, saved, ALL, publishes=True)

    [left] = uploader.close(drain=True)

    assert "busy" in str(left.error)


def test_closed_uploader_takes_nothing_more(saved, manifest, tmp_path, uploader_of):
    uploader = uploader_of(tmp_path / "a")
    uploader.close(drain=True)

    with pytest.raises(ValueError, match="closed"):
        uploader.submit(manifest, saved, ALL, publishes=True)


def test_threads_yield_to_the_program(
    saved, manifest, tmp_path, uploader_of, monkeypatch
):
    monkeypatch.setenv("MPICKPT_NICE", "7")
    seen = []
    take = DirectoryTarget.take

    def note(target, *arguments, **options):
        thread = threading.get_native_id()
        seen.append(os.getpriority(os.PRIO_PROCESS, thread))
        take(target, *arguments, **options)

    monkeypatch.setattr(DirectoryTarget, "take", note)
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, saved, ALL, publishes=True)

    assert uploader.wait(SOON_S)
    assert set(seen) == {7}


def test_uploader_without_work_starts_no_thread(tmp_path, uploader_of):
    before = threading.active_count()

    uploader = uploader_of(tmp_path / "a")

    assert threading.active_count() == before
    assert isinstance(uploader.close(drain=True), list)


def test_error_is_of_the_library(saved, manifest, tmp_path, uploader_of, monkeypatch):
    Refusals(monkeypatch, RuntimeError("a bug"), count=1)
    uploader = uploader_of(tmp_path / "a")

    uploader.submit(manifest, saved, ALL, publishes=True)
    uploader.wait(SOON_S)

    [failed] = uploader.errors()
    assert isinstance(failed.error, CheckpointError)
