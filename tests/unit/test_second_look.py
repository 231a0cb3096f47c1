"""What a node that remembers too much does about it."""

import errno
import os
from pathlib import Path

import pytest

from mpickpt.errors import IncompleteCheckpointError, StorageError
from mpickpt.storage import second_look
from mpickpt.storage.commit import make_directory
from mpickpt.storage.second_look import SecondLook, list_afresh, meet
from mpickpt.storage.shard_file import open_shard_file
from mpickpt.storage.small_file import names_in

CONTENT = b"0123456789"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(second_look, "PATIENCE_S", 0.1)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(CONTENT)
    return path


def missing(path):
    return IncompleteCheckpointError(f"{path} is missing", path=str(path))


def failing(call, times, error):
    """Return a call that fails so many times at first."""
    left = [times]

    def attempt(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise OSError(error, os.strerror(error))
        return call(*arguments, **options)

    return attempt


def test_second_look_comes_once_for_a_name_that_is_not_listed(tmp_path):
    look = SecondLook(tmp_path / "shard")

    helps = [look.helps(missing("shard")) for _ in range(2)]

    assert helps == [True, False]


def test_second_look_goes_on_while_the_name_is_listed(file):
    look = SecondLook(file)

    helps = [look.helps(missing(file)) for _ in range(3)]

    assert helps == [True, True, True]


def test_second_look_ends_when_patience_does(file):
    look, count = SecondLook(file, is_new=True), 0

    while look.helps(missing(file)):
        count += 1

    assert 2 < count < 20


def test_second_look_leaves_other_errors_alone(file):
    look = SecondLook(file)

    assert not look.helps(StorageError("refused", errno=errno.EACCES))


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
def test_open_succeeds_when_the_name_comes_late(file, monkeypatch, error):
    monkeypatch.setattr(os, "open", failing(os.open, 2, error))

    with open_shard_file(file, nbytes=len(CONTENT), direct=False) as opened:
        assert opened.nbytes == len(CONTENT)


def test_open_tells_of_a_handle_that_stays_stale(file, monkeypatch):
    monkeypatch.setattr(os, "open", failing(os.open, 10**6, errno.ESTALE))

    with pytest.raises(StorageError) as caught, open_shard_file(file, direct=False):
        pass

    assert caught.value.errno == errno.ESTALE
    assert caught.value.path == str(file)


def test_read_takes_a_new_handle_when_the_server_forgot_the_old_one(file, monkeypatch):
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1, errno.ESTALE))
    content = bytearray(len(CONTENT))

    with open_shard_file(file, direct=False) as opened:
        opened.read_at(memoryview(content), 0)

    assert bytes(content) == CONTENT


def test_read_refuses_another_file_in_place_of_a_stale_one(file, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", failing(os.preadv, 1, errno.ESTALE))

    with open_shard_file(file, direct=False) as opened:
        other = tmp_path / "other"
        other.write_bytes(CONTENT[::-1])
        other.replace(file)
        with pytest.raises(StorageError) as caught:
            opened.read_at(memoryview(bytearray(len(CONTENT))), 0)

    assert caught.value.errno == errno.ESTALE


def test_listing_asks_above_when_the_directory_seems_gone(tmp_path, monkeypatch):
    asked = []
    real = failing(os.listdir, 1, errno.ESTALE)

    def listdir(path):
        asked.append(path)
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    (tmp_path / "run").mkdir()

    assert list_afresh(tmp_path / "run") == []
    assert asked == [tmp_path / "run", tmp_path, tmp_path / "run"]


def test_meet_waits_for_a_directory_that_another_node_has_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "stat", failing(os.stat, 2, errno.ENOENT))

    meet(tmp_path)


def test_meet_raises_when_the_directory_does_not_come(tmp_path):
    with pytest.raises(FileNotFoundError):
        meet(tmp_path / "absent", inode=1)


def test_meet_asks_the_server_for_a_directory_of_another_number(tmp_path, monkeypatch):
    asked = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda p: asked.append(p) or real(p))
    (tmp_path / "step").mkdir()

    meet(tmp_path / "step", inode=0)

    assert asked == [tmp_path]


def test_error_names_the_directory_above_that_cannot_be_listed(tmp_path, monkeypatch):
    listdir = os.listdir

    def refuse(path):
        if Path(path) == tmp_path:
            raise OSError(errno.EIO, "I/O error", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)

    with pytest.raises(StorageError) as caught:
        names_in(tmp_path / "absent")

    assert (caught.value.errno, caught.value.path) == (errno.EIO, str(tmp_path))


def test_directory_is_made_though_its_parent_was_stale(tmp_path, monkeypatch):
    mkdir, refused = os.mkdir, []

    def refuse_once(path, mode=0o777):
        if not refused:
            refused.append(path)
            raise OSError(errno.ESTALE, "Stale file handle", path)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", refuse_once)

    make_directory(tmp_path / "run" / "step")

    assert refused
    assert (tmp_path / "run" / "step").is_dir()
