"""The control files of a run."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mpickpt
from mpickpt import CheckpointNotFoundError, KeepBest, StorageError
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.planning.retention import plan_retention
from mpickpt.storage import commit, manifest_cache
from mpickpt.storage.halt_file import HaltFile
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.run_entry import retention_candidates
from tests.unit.runs import published, save, truncate_shard


@pytest.fixture
def run_dir(tmp_path):
    save(tmp_path / "run", 5, 100, 20, metrics={"loss": 1.0})
    return tmp_path / "run"


@pytest.fixture
def run(run_dir):
    return RunDirectory(run_dir)


def test_run_that_does_not_exist_has_nothing(tmp_path):
    run = RunDirectory(tmp_path / "absent")

    assert run.candidates() == run.rejected() == run.pins() == []
    assert not HaltFile(run.path).exists
    assert HaltFile(run.path).reason is None
    assert run.attempts(1) == 0
    assert not (tmp_path / "absent").exists()


def test_candidates_come_in_order_of_step_whatever_the_times(run, run_dir):
    save(run_dir, 12345678901)
    os.utime(run_dir / "step-0000000005", (2e9, 2e9))
    os.utime(run_dir / "step-0000000005" / MANIFEST_NAME, (0, 0))

    entries = run.candidates()

    assert [entry.step for entry in entries] == [5, 20, 100, 12345678901]
    assert entries[0].nbytes == mpickpt.read_manifest(entries[0].path).nbytes
    assert entries[0].created_at.endswith("Z")
    assert all(entry.is_whole for entry in entries)


def test_pins_come_and_go(run):
    run.pin(20)
    run.pin(20)
    run.pin(5)

    assert run.pins() == [5, 20]
    assert [entry.is_pinned for entry in run.candidates()] == [True, True, False]

    run.unpin(20)
    run.unpin(7)

    assert run.pins() == [5]


def test_pin_of_a_step_that_is_not_there_is_refused(run):
    with pytest.raises(CheckpointNotFoundError, match="step-0000000007"):
        run.pin(7)

    assert run.pins() == []


def test_link_to_a_checkpoint_elsewhere_counts_as_pinned(run, run_dir):
    archive = run_dir.parent / "archive"
    mpickpt.step_path(run_dir, 5).rename(archive)
    mpickpt.step_path(run_dir, 5).symlink_to(archive)

    assert [entry.is_pinned for entry in run.candidates()] == [True, False, False]


def test_metrics_that_come_later_join_and_replace(run, run_dir):
    mpickpt.set_metrics(run_dir, 20, {"acc": np.float32(0.5), "loss": 3})
    mpickpt.set_metrics(run_dir, 20, {"loss": 0.5})

    metrics = [entry.metrics for entry in run.candidates()]

    assert metrics == [{"loss": 1.0}, {"loss": 0.5, "acc": 0.5}, {"loss": 1.0}]


def test_later_metrics_decide_what_is_best(run, run_dir):
    mpickpt.set_metrics(run_dir, 5, {"loss": 0.1})

    verdicts = plan_retention(
        retention_candidates(run.candidates()), KeepBest(1, "loss")
    )

    assert [v.step for v in verdicts if v.keep] == [5, 100]


def test_metrics_of_several_evaluators_are_all_kept(run, run_dir):
    with ThreadPoolExecutor(8) as threads:
        list(
            threads.map(
                lambda n: mpickpt.set_metrics(run_dir, 5, {f"m{n}": n}), range(8)
            )
        )

    assert run.candidates()[0].metrics == {f"m{n}": n for n in range(8)} | {"loss": 1}


def test_metrics_do_not_pass_to_another_save_of_the_step(run, run_dir):
    mpickpt.set_metrics(run_dir, 20, {"acc": 1})

    save(run_dir, 20, overwrite=True)

    assert run.candidates()[1].metrics == {}


@pytest.mark.parametrize("value", [float("nan"), np.float64("inf"), {1}, object()])
def test_metrics_that_json_cannot_hold_are_refused(run, run_dir, value):
    with pytest.raises((ValueError, TypeError)):
        mpickpt.set_metrics(run_dir, 20, {"acc": value})

    assert run.candidates()[1].metrics == {"loss": 1.0}


def test_metrics_need_a_published_checkpoint(run_dir):
    with pytest.raises(CheckpointNotFoundError):
        mpickpt.set_metrics(run_dir, 6, {"acc": 1})


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff{", b'{"metrics": 3}'])
def test_damaged_control_files_stop_nothing(run, run_dir, content):
    mpickpt.set_metrics(run_dir, 5, {"acc": 1})
    run.note_attempt(5)
    for name in ("metrics", "attempts"):
        (run_dir / ".mpickpt" / name / "step-0000000005.json").write_bytes(content)

    assert run.candidates()[0].metrics == {"loss": 1.0}
    assert run.attempts(5) == 0


def test_entry_tells_what_is_wrong(run, run_dir):
    shard = truncate_shard(run_dir, 5)
    (mpickpt.step_path(run_dir, 100) / MANIFEST_NAME).write_text("{}")

    first, second, third = run.candidates()

    assert shard.name in first.problem
    assert second.is_whole
    assert "schema_version" in third.problem
    assert (third.nbytes, third.created_at, third.metrics) == (0, None, {})


def test_sizes_are_looked_at_only_when_asked(run, run_dir):
    first = run.candidates()[0]

    truncate_shard(run_dir, 5)

    assert not first.is_whole


def test_only_known_good_ones_of_the_right_size_are_good(run, run_dir):
    truncate_shard(run_dir, 5)

    entries = run.candidates()

    assert [c.is_good for c in retention_candidates(entries, {5, 20})] == [
        False,
        True,
        False,
    ]
    assert [c.is_good for c in retention_candidates(entries)] == [False, True, True]


def test_manifests_are_read_once(run, run_dir, monkeypatch):
    before = run.candidates()

    monkeypatch.setattr(manifest_cache, "read_manifest", lambda path: 1 / 0)

    assert run.candidates() == before
    (mpickpt.step_path(run_dir, 5) / MANIFEST_NAME).write_text("{}")
    with pytest.raises(ZeroDivisionError):
        run.candidates()


def test_halt_comes_with_a_reason_and_goes(run_dir):
    halt_file = HaltFile(run_dir)
    halt_file.write("maintenance")

    assert halt_file.exists
    assert halt_file.reason == "maintenance"

    halt_file.remove()
    halt_file.remove()

    assert not halt_file.exists


def test_attempts_are_counted_until_there_is_progress(run):
    assert [run.note_attempt(20), run.note_attempt(20), run.note_attempt(5)] == [
        1,
        2,
        1,
    ]
    assert (run.attempts(20), run.attempts(5), run.attempts(100)) == (2, 1, 0)

    run.clear_attempts()

    assert run.attempts(20) == run.attempts(5) == 0


def test_rejected_checkpoint_is_out_of_the_way_and_tells_why(run, run_dir):
    manifest = mpickpt.read_manifest(mpickpt.step_path(run_dir, 100))
    run.note_attempt(100)

    target = run.reject(100, "shard damaged")

    assert target == run_dir / f"step-0000000100.rejected-{manifest.id8}"
    assert published(run_dir) == [5, 20]
    assert run.attempts(100) == 0
    [entry] = run.rejected()
    assert (entry.step, entry.path, entry.reason) == (100, target, "shard damaged")
    save(run_dir, 100)
    assert published(run_dir) == [5, 20, 100]


def test_rejected_ones_are_in_order_of_rejection(run, run_dir):
    (mpickpt.step_path(run_dir, 20) / MANIFEST_NAME).write_text("{}")
    for step in (100, 20, 5):
        run.reject(step, "")

    assert [entry.step for entry in run.rejected()] == [100, 20, 5]


def test_pin_goes_with_a_rejected_checkpoint(run):
    run.pin(100)

    run.reject(100, "rewind")

    assert run.pins() == []
    assert run.rejected()[0].is_pinned


def test_rejecting_can_be_done_again_after_a_crash(run, run_dir, monkeypatch):
    run.pin(100)

    def crash(source, target):
        raise StorageError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr("mpickpt.storage.run_directory.rename_durably", crash)
        with pytest.raises(StorageError):
            run.reject(100, "first")

    assert published(run_dir) == [5, 20, 100]
    assert run.pins() == [100]
    run.reject(100, "second")
    assert [entry.reason for entry in run.rejected()] == ["second"]
    assert run.rejected()[0].is_pinned


def test_control_files_are_durable(run, run_dir, monkeypatch):
    synced = []

    def sync(path):
        synced.append(path)

    monkeypatch.setattr(commit, "sync_directory", sync)

    run.pin(5)
    HaltFile(run_dir).write()

    assert run_dir / ".mpickpt" / "pins" in synced
    assert run_dir / ".mpickpt" in synced


def test_failed_write_leaves_the_old_file(run_dir, monkeypatch):
    halt_file = HaltFile(run_dir)
    halt_file.write("old")

    def fail(tmp, final):
        raise StorageError("full")

    monkeypatch.setattr("mpickpt.storage.small_file.publish", fail)

    with pytest.raises(StorageError):
        halt_file.write("new")
    assert halt_file.reason == "old"
    assert os.listdir(run_dir / ".mpickpt") == ["halt"]


@pytest.mark.parametrize("linked", [".mpickpt", ".mpickpt/attempts"])
def test_nothing_behind_a_symlink_is_read_or_changed(run, run_dir, tmp_path, linked):
    outside = tmp_path / "outside"
    (outside / "attempts").mkdir(parents=True)
    for folder in (outside, outside / "attempts"):
        (folder / "step-0000000020.json").write_text('{"attempts": 7}')
    (run_dir / ".mpickpt").mkdir(exist_ok=True)
    if linked == ".mpickpt":
        (run_dir / ".mpickpt").rmdir()
    (run_dir / linked).symlink_to(outside)

    assert run.attempts(20) == 0
    run.clear_attempts()
    run.forget(20)
    with pytest.raises(StorageError, match="symbolic link"):
        run.note_attempt(20)

    assert len(list(outside.rglob("*.json"))) == 2


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_control_file_that_is_no_file_is_ignored(run, run_dir, make):
    path = run_dir / ".mpickpt" / "attempts" / "step-0000000020.json"
    path.parent.mkdir(parents=True)
    make(path)

    assert run.attempts(20) == 0


@pytest.mark.parametrize("number", ["9" * 4300, "-1", "true", "1.5", "NaN", '"1"'])
def test_number_that_nobody_wrote_counts_as_none(run, run_dir, number):
    path = run_dir / ".mpickpt" / "attempts" / "step-0000000020.json"
    path.parent.mkdir(parents=True)
    path.write_text(f'{{"attempts": {number}}}')

    assert run.note_attempt(20) == 1


def test_checkpoint_in_the_directory_of_another_step_is_damaged(run, run_dir):
    shutil.copytree(run_dir / "step-0000000005", run_dir / "step-0000000200")

    entry = run.candidates()[-1]

    assert not entry.is_whole
    assert "holds the checkpoint of step 5" in entry.problem
