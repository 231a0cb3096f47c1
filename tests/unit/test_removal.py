"""Removing checkpoints, and what crashes left."""

import os
import shutil

import pytest

import mpickpt
from mpickpt import CheckpointNotFoundError, StorageError
from mpickpt.cli.main import main
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.storage import removal, sweep
from mpickpt.storage.lease import Lease
from mpickpt.storage.removal import (
    remove_checkpoint,
    remove_directory_if_empty,
    remove_files,
    unpublish,
)
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.sweep import sweep_siblings
from tests.unit.runs import files_below, published, save


@pytest.fixture
def run_dir(tmp_path):
    save(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"


@pytest.fixture
def checkpoint(run_dir):
    return mpickpt.step_path(run_dir, 2)


def big_world_directory(run_dir):
    """Return a directory as 1,001 ranks leave it, with a manifest."""
    path = mpickpt.step_path(run_dir, 9)
    for number in (0, 1):
        inner = path / f"ranks{number:05d}"
        inner.mkdir(parents=True)
        (inner / f"rank{1000 * number:05d}-0123abcd.h5").write_text("")
    (path / MANIFEST_NAME).write_text("{}")
    return path


def test_checkpoint_is_removed_with_its_directory(run_dir, checkpoint):
    assert remove_checkpoint(checkpoint)

    assert published(run_dir) == [1, 3]
    assert not checkpoint.exists()


def test_sub_directories_of_many_ranks_go_too(run_dir):
    path = big_world_directory(run_dir)

    assert remove_checkpoint(str(path))

    assert not path.exists()


def test_manifest_goes_first_and_durably(checkpoint, monkeypatch):
    order = []
    monkeypatch.setattr(removal, "unlink_durably", lambda path: order.append(path.name))
    monkeypatch.setattr(removal, "remove_files", lambda paths: order.append("files"))

    remove_checkpoint(checkpoint)

    assert order == [MANIFEST_NAME, "files"]


def test_unpublished_files_may_be_removed_by_anyone_in_any_order(run_dir, checkpoint):
    files = unpublish(checkpoint)

    assert published(run_dir) == [1, 3]
    assert files
    assert all(path.exists() for path in files)
    remove_files(reversed(files))
    remove_files(files)
    assert remove_directory_if_empty(checkpoint)
    assert remove_directory_if_empty(checkpoint)


def test_files_of_others_are_never_touched(run_dir, checkpoint):
    (checkpoint / "notes.txt").write_text("mine")
    (checkpoint / "best").mkdir()
    (checkpoint / "best" / "rank00000-0123abcd.h5").write_text("mine")
    (checkpoint / "ranks00000").mkdir()
    (checkpoint / "ranks00000" / "notes.txt").write_text("mine")

    assert not remove_checkpoint(checkpoint)

    assert files_below(checkpoint) == [
        "best",
        "best/rank00000-0123abcd.h5",
        "notes.txt",
        "ranks00000",
        "ranks00000/notes.txt",
    ]
    assert published(run_dir) == [1, 3]


def test_what_a_link_leads_to_is_not_removed(run_dir, checkpoint):
    archive = run_dir.parent / "archive"
    checkpoint.rename(archive)
    checkpoint.symlink_to(archive)

    with pytest.raises(StorageError, match="symbolic link"):
        remove_checkpoint(checkpoint)

    assert mpickpt.read_manifest(archive).step == 2


def test_all_files_are_tried_before_the_first_failure_is_raised(tmp_path):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError, match="directory"):
        remove_files([tmp_path / "directory", tmp_path / "file"])

    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("crash", ["after_manifest", "after_some_files"])
def test_crash_while_removing_leaves_nothing_that_passes_for_whole(
    run_dir, checkpoint, crash, capsys
):
    (checkpoint / "rank00001-0123abcd.h5").write_text("of a second rank")
    files = unpublish(checkpoint)
    if crash == "after_some_files":
        remove_files(files[:1])

    main(["ls", str(run_dir)])

    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[-5]) for row in rows[1:]] == [
        ("1", "whole"),
        ("2", "saving"),
        ("3", "whole"),
    ]
    with pytest.raises(CheckpointNotFoundError):
        mpickpt.read_manifest(checkpoint)
    sweep_siblings(run_dir, set())
    assert not checkpoint.exists()
    assert published(run_dir) == [1, 3]


def unpublished(run_dir, step, *names):
    path = mpickpt.step_path(run_dir, step)
    path.mkdir()
    for name in names:
        (path / name).write_text("")
    return path


def test_sweep_removes_what_crashed_saves_left(run_dir):
    path = unpublished(
        run_dir,
        7,
        "rank00000-0123abcd.h5.tmp",
        "rank00001-0123abcd.h5",
        "layout-0123456789abcdef.h5.tmp",
        "receipts-0123abcd.json",
        "manifest.json.tmp",
    )
    mixed = unpublished(run_dir, 8, "rank00000-0123abcd.h5", "notes.txt")

    sweep_siblings(run_dir, set())

    assert not path.exists()
    assert files_below(mixed) == ["notes.txt"]
    assert published(run_dir) == [1, 2, 3]


def test_sweep_leaves_saves_in_flight_alone(run_dir):
    save_id = "0123abcd" + 24 * "0"
    flying = unpublished(run_dir, 7, "rank00000-0123abcd.h5.tmp", "layout-x.h5.tmp")
    begun = unpublished(run_dir, 8)

    sweep_siblings(run_dir, {save_id}, sparing=[begun])

    assert len(files_below(flying)) == 2
    assert begun.exists()


def test_sweep_touches_nothing_that_is_not_named_after_a_step(run_dir):
    for name in ("step-7", "best", "step-0000000007.bak"):
        (run_dir / name).mkdir()
        (run_dir / name / "rank00000-0123abcd.h5").write_text("")
    before = files_below(run_dir)

    sweep_siblings(run_dir, set())

    assert files_below(run_dir) == before


def test_sweep_asks_the_directory_before_it_believes_in_rubbish(run_dir, monkeypatch):
    listed = sweep.step_directories(run_dir)

    def stale(path):
        return [
            type(found)(
                step=found.step, path=found.path, is_published=False, is_rejected=False
            )
            for found in listed
        ]

    monkeypatch.setattr(sweep, "step_directories", stale)

    sweep_siblings(run_dir, set())

    assert published(run_dir) == [1, 2, 3]


def test_sweep_keeps_the_newest_two_rejected_and_pinned_ones(run_dir):
    save(run_dir, 4, 5)
    run = RunDirectory(run_dir)
    run.pin(5)
    for step in (5, 4, 3, 2):
        run.reject(step, "rewind")

    sweep_siblings(run_dir, set())

    assert [entry.step for entry in run.rejected()] == [5, 3, 2]
    assert len(os.listdir(run_dir / ".mpickpt" / "rejected")) == 3


def test_sweep_goes_on_after_a_failure(run_dir, monkeypatch, caplog):
    first = unpublished(run_dir, 7, "rank00000-0123abcd.h5")
    second = unpublished(run_dir, 8, "rank00000-0123abcd.h5")
    remove = sweep.remove_files

    def failing(paths):
        if any(path.parent == first for path in paths):
            raise StorageError("cannot remove")
        remove(paths)

    monkeypatch.setattr(sweep, "remove_files", failing)

    sweep_siblings(run_dir, set())

    assert first.exists()
    assert not second.exists()
    assert "step-0000000007 was not swept" in caplog.text


def test_sweep_removes_what_is_said_about_checkpoints_that_are_gone(run_dir):
    run = RunDirectory(run_dir)
    first, *_, last = published(run_dir)
    for step in (first, last):
        run.pin(step)
        run.set_metrics(step, {"loss": 1.0})
    # As after a crash between the two halves of a removal.
    remove_checkpoint(mpickpt.step_path(run_dir, first))

    sweep_siblings(run_dir, set())

    assert run.pins() == [last]
    assert os.listdir(run_dir / ".mpickpt/pins") == [f"step-{last:010d}"]
    assert f"step-{first:010d}.json" not in os.listdir(run_dir / ".mpickpt/metrics")


def test_sweep_removes_control_files_that_a_crash_cut_short(run_dir):
    control = run_dir / ".mpickpt"
    run = RunDirectory(run_dir)
    run.pin(published(run_dir)[0])
    old, new = (control / f"halt.{token}.tmp" for token in ("0123abcd", "4567abcd"))
    old_pin, theirs = control / "pins/step-0000000001.89abcdef.tmp", control / "a.tmp"
    with Lease.acquire(run_dir):
        for path in (old, new, old_pin, theirs):
            path.touch()
        for path in (old, old_pin, theirs):
            os.utime(path, (0, 0))

        sweep_siblings(run_dir, set())

    assert [path.exists() for path in (old, old_pin)] == [False, False]
    assert [path.exists() for path in (new, theirs)] == [True, True]


def test_sweep_of_a_run_that_does_not_exist_does_nothing(tmp_path):
    sweep_siblings(tmp_path / "absent", set())

    assert not (tmp_path / "absent").exists()


def test_removed_and_saved_again_is_whole(run_dir, checkpoint):
    shutil.copytree(checkpoint, run_dir / "copy")
    remove_checkpoint(checkpoint)

    save(run_dir, 2)

    assert published(run_dir) == [1, 2, 3]
