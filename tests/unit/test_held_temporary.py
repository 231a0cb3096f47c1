"""Temporary files of which several processes may have one for the same name."""

import fcntl
import os

import pytest

from mpickpt.errors import StorageError
from mpickpt.storage import held_temporary
from mpickpt.storage.held_temporary import (
    ABANDONED_S,
    discard_if_abandoned,
    is_temporary,
)


@pytest.fixture
def final(tmp_path):
    return tmp_path / "rank00000-0123abcd.h5"


def hold(final):
    return held_temporary.held_temporary(final)


def now_of(path):
    return path.stat().st_mtime


def test_file_is_gone_when_nobody_renamed_it(final):
    with hold(final) as held:
        os.close(held.descriptor)
        assert is_temporary(held.path)
        assert held.path.exists()

    assert list(final.parent.iterdir()) == []


def test_renamed_file_stays(final):
    with hold(final) as held:
        os.write(held.descriptor, b"content")
        os.close(held.descriptor)
        held.path.rename(final)

    assert final.read_bytes() == b"content"


def test_two_at_once_have_names_of_their_own(final):
    with hold(final) as one, hold(final) as other:
        os.close(one.descriptor)
        os.close(other.descriptor)

        assert one.path != other.path
        for held in (one, other):
            assert not discard_if_abandoned(held.path, now_of(held.path))
            assert held.path.exists()


def test_name_of_another_is_not_removed_after_a_rename(final):
    with hold(final) as one:
        os.close(one.descriptor)
        one.path.rename(final)
        one.path.write_bytes(b"of another copier")

    assert one.path.exists()


def test_what_a_killed_one_left_is_replaced(final):
    with hold(final) as held:
        os.close(held.descriptor)
        left = held.path
    left.write_bytes(b"part of a shard")

    with hold(final) as again:
        os.close(again.descriptor)
        assert again.path == left
        assert left.read_bytes() == b""


def test_what_is_not_locked_here_is_abandoned_at_once(final):
    with hold(final) as held:
        os.close(held.descriptor)
    held.path.write_bytes(b"left")

    assert discard_if_abandoned(held.path, now_of(held.path))
    assert not held.path.exists()


def test_other_machines_are_given_time(final):
    path = final.with_name(f"{final.name}.fffffabc.tmp")
    path.write_bytes(b"of another node")
    now_s = now_of(path)

    assert not discard_if_abandoned(path, now_s + ABANDONED_S - 5)
    assert discard_if_abandoned(path, now_s + ABANDONED_S + 5)


def test_without_locks_age_alone_tells(final, monkeypatch):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    with hold(final) as held:
        os.close(held.descriptor)
        now_s = now_of(held.path)
        assert not discard_if_abandoned(held.path, now_s)
        with hold(final) as other:
            os.close(other.descriptor)
            assert other.path != held.path
        assert discard_if_abandoned(held.path, now_s + ABANDONED_S + 5)


def test_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(StorageError), hold(tmp_path / "none" / "file"):
        pass


def test_other_name_that_is_free_gets_none(final):
    assert not discard_if_abandoned(final, 0.0)
