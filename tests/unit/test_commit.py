"""Durability and visibility of files."""

import errno
import os
from pathlib import Path

import pytest

from mpickpt.errors import StorageError
from mpickpt.storage import commit
from mpickpt.storage.manifest_publishing import publish_manifest

MANIFEST = "manifest.json"


class FailingCalls:
    """Fails chosen calls of a function of `os`, by number, and logs all of them."""

    def __init__(self, monkeypatch, name, failing, code=errno.EIO):
        self.log = []
        original = getattr(os, name)

        def call(*arguments):
            self.log.append(arguments)
            if len(self.log) in failing:
                raise OSError(code, os.strerror(code))
            return original(*arguments)

        monkeypatch.setattr(os, name, call)


def test_storage_errors_translates_with_errno_path_and_cause(tmp_path):
    with pytest.raises(StorageError) as caught, commit.storage_errors("read", tmp_path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    assert (caught.value.errno, caught.value.path) == (errno.EDQUOT, str(tmp_path))
    assert isinstance(caught.value.__cause__, OSError)
    assert str(caught.value) == f"cannot read {tmp_path}: Disk quota exceeded"


def test_create_file_refuses_a_name_that_exists(tmp_path):
    path = tmp_path / "shard.tmp"
    path.touch()

    with pytest.raises(StorageError) as caught:
        commit.create_file(path)

    assert caught.value.errno == errno.EEXIST


def test_create_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        os.close(commit.create_file(tmp_path / "shard.tmp"))
    finally:
        os.umask(before)

    assert (tmp_path / "shard.tmp").stat().st_mode & 0o777 == 0o640


def test_sync_file_does_not_try_again_when_it_fails(tmp_path, monkeypatch):
    calls = FailingCalls(monkeypatch, "fsync", failing={1})
    descriptor = commit.create_file(tmp_path / "shard.tmp")

    with pytest.raises(StorageError):
        commit.sync_file(descriptor, tmp_path / "shard.tmp")
    os.close(descriptor)

    assert len(calls.log) == 1


def test_write_new_file_goes_on_after_a_short_write(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: write(fd, view[:3]))

    commit.write_new_file(tmp_path / "file", b"0123456789")

    assert (tmp_path / "file").read_bytes() == b"0123456789"


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_write_new_file_leaves_nothing_when_it_fails(tmp_path, monkeypatch, name):
    FailingCalls(monkeypatch, name, failing={1}, code=errno.ENOSPC)

    with pytest.raises(StorageError) as caught:
        commit.write_new_file(tmp_path / "file", b"content")

    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_publish_syncs_the_directory_after_the_rename(tmp_path, monkeypatch):
    (tmp_path / "a.tmp").write_bytes(b"new")
    (tmp_path / "a").write_bytes(b"old")
    order = []
    for name in ("rename", "fsync"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, n=name, f=original: (order.append(n), f(*a))
        )

    commit.publish(tmp_path / "a.tmp", tmp_path / "a")

    assert order == ["rename", "fsync"]
    assert (tmp_path / "a").read_bytes() == b"new"


def test_make_directory_makes_and_syncs_every_missing_parent(tmp_path, monkeypatch):
    calls = FailingCalls(monkeypatch, "fsync", failing=())

    (tmp_path / "file").touch()
    commit.make_directory(tmp_path / "run" / "step")
    commit.make_directory(tmp_path / "run" / "step")

    assert (tmp_path / "run" / "step").is_dir()
    assert len(calls.log) == 2


def test_make_directory_syncs_the_name_of_an_empty_directory(tmp_path, monkeypatch):
    calls = FailingCalls(monkeypatch, "fsync", failing=())
    (tmp_path / "run").mkdir()

    commit.make_directory(tmp_path / "run" / "step-1")
    commit.make_directory(tmp_path / "run" / "step-2")

    assert len(calls.log) == 3


def test_make_directory_refuses_a_file_of_that_name(tmp_path):
    (tmp_path / "run").touch()

    with pytest.raises(StorageError) as caught:
        commit.make_directory(tmp_path / "run")

    assert caught.value.errno == errno.EEXIST


def test_unlink_durably_accepts_a_file_that_is_gone(tmp_path):
    (tmp_path / "a").touch()

    commit.unlink_durably(tmp_path / "a")
    commit.unlink_durably(tmp_path / "a")

    assert list(tmp_path.iterdir()) == []


def test_rename_durably_syncs_both_directories(tmp_path, monkeypatch):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    (tmp_path / "x" / "a").touch()
    calls = FailingCalls(monkeypatch, "fsync", failing=())

    commit.rename_durably(tmp_path / "x" / "a", tmp_path / "y" / "b")

    assert (tmp_path / "y" / "b").exists()
    assert len(calls.log) == 2


def test_publish_manifest_replaces_a_stale_temporary_file(tmp_path):
    (tmp_path / f"{MANIFEST}.tmp").write_bytes(b"of a crash")

    publish_manifest(tmp_path, b"{}")

    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]
    assert (tmp_path / MANIFEST).read_bytes() == b"{}"


# In this order: the directory, the temporary file, the directory after the rename,
# and its parent.
STEPS = {"before_write": 1, "after_write": 2, "after_rename": 3, "of_parent": 4}


@pytest.mark.parametrize("before", [None, b"old"])
@pytest.mark.parametrize("step", STEPS)
def test_publish_manifest_undoes_it_when_a_sync_fails(
    tmp_path, monkeypatch, step, before
):
    if before:
        (tmp_path / MANIFEST).write_bytes(before)
    FailingCalls(monkeypatch, "fsync", failing={STEPS[step]})

    with pytest.raises(StorageError) as caught:
        publish_manifest(tmp_path, b"new")

    assert "unknown" not in str(caught.value)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert kept == ({MANIFEST: before} if before else {})


@pytest.mark.parametrize("before", [None, b"old"])
def test_publish_manifest_keeps_what_was_there_when_the_rename_fails(
    tmp_path, monkeypatch, before
):
    if before:
        (tmp_path / MANIFEST).write_bytes(before)
    FailingCalls(monkeypatch, "rename", failing={1})

    with pytest.raises(StorageError):
        publish_manifest(tmp_path, b"new")

    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert kept == ({MANIFEST: before} if before else {})


def test_publish_manifest_says_unknown_when_it_cannot_be_undone(tmp_path, monkeypatch):
    FailingCalls(monkeypatch, "fsync", failing=range(3, 9))

    with pytest.raises(StorageError, match="is unknown") as caught:
        publish_manifest(tmp_path, b"new")

    assert caught.value.errno == errno.EIO


def test_only_commit_calls_fsync_and_rename():
    package = Path(commit.__file__).parents[1]

    users = {
        path.name
        for path in package.rglob("*.py")
        for word in ("os.fsync(", "os.rename(", "os.replace(")
        if word in path.read_text()
    }

    assert users == {"commit.py"}
