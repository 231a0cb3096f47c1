"""What probes of a file system tell, on real ones and where calls fail."""

import errno
import fcntl
import os

import pytest

from mpickpt.errors import StorageError
from mpickpt.storage import commit, latency, probes
from mpickpt.storage.filesystem import Mount
from mpickpt.storage.latency import Often
from mpickpt.storage.mount_options import find_options, mount_options_of
from mpickpt.storage.speed import measured_speed

SOME = Often(3, 5.0)
MIB = 1 << 20


@pytest.fixture(params=["disk", "memory"])
def directory(request, tmp_path):
    return tmp_path if request.param == "disk" else request.getfixturevalue("memory")


@pytest.fixture
def memory(small_disk):
    return small_disk


def test_rename_replaces_at_once(directory):
    found = probes.probe_renaming(directory, SOME)

    assert (found.replaces, found.n_missed, found.keeps_readers) == (True, 0, True)
    assert found.n_opened > 0
    assert 0 < found.timing.median_s <= found.timing.worst_s
    assert found.timing.count == 3


def test_rename_that_leaves_a_gap_is_seen(tmp_path, monkeypatch):
    rename = os.rename  # noqa: TID251

    def with_a_gap(source, target):
        os.unlink(target)
        for _ in range(1000):
            os.sched_yield()
        rename(source, target)

    monkeypatch.setattr(commit.os, "rename", with_a_gap)

    assert probes.probe_renaming(tmp_path, Often(20, 5.0)).n_missed > 0


def test_copy_in_place_of_a_rename_is_seen(tmp_path, monkeypatch):
    def copy(source, target):
        with open(source, "rb") as new, open(target, "wb") as old:
            old.write(new.read())

    monkeypatch.setattr(commit.os, "rename", copy)

    with pytest.raises(StorageError):  # the source is still there
        probes.probe_renaming(tmp_path, SOME)


def test_locks_are_granted(directory):
    assert probes.probe_locks(directory).are_granted


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, 524])
def test_refused_locks_are_named(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)

    found = probes.probe_locks(tmp_path)

    assert found.flock == errno.errorcode.get(number, "524")
    assert found.fcntl == "granted"
    assert not found.are_granted


def test_lock_of_another_is_met(tmp_path):
    path = tmp_path / "lock"
    descriptor = probes.hold_lock(path)

    assert probes.is_locked(path)
    os.close(descriptor)
    assert not probes.is_locked(path)


def test_direct_io_has_an_alignment(tmp_path):
    found = probes.probe_direct_io(tmp_path)

    assert found.is_accepted == (found.alignment_nbytes is not None)


def test_refused_direct_io_is_named(tmp_path, monkeypatch):
    set_flags = fcntl.fcntl

    def refuse(descriptor, command, *flags):
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no")
        return set_flags(descriptor, command, *flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)

    found = probes.probe_direct_io(tmp_path)

    assert (found.is_accepted, found.errno) == (False, "EINVAL")


def test_first_direct_write_may_be_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(os, "pwrite", refuse)

    assert probes.probe_direct_io(tmp_path).errno == "EINVAL"


def test_direct_io_on_a_full_disk_is_an_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", refuse)

    with pytest.raises(OSError, match="full"):
        probes.probe_direct_io(tmp_path)


def test_exclusive_create_is_kept(directory):
    assert probes.probe_exclusive(directory)


def test_exclusive_create_that_is_not_kept_is_seen(tmp_path, monkeypatch):
    def create(path):
        return os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    monkeypatch.setattr(latency, "create_file", create)

    assert not probes.probe_exclusive(tmp_path)


def test_clock_is_this_node_s(directory):
    assert probes.probe_clock(directory) == 0.0


@pytest.mark.parametrize("skew_s", [-60.0, 60.0])
def test_other_clock_is_seen(tmp_path, monkeypatch, skew_s):
    time = probes.time.time
    monkeypatch.setattr(probes.time, "time", lambda: time() - skew_s)

    assert probes.probe_clock(tmp_path) == pytest.approx(skew_s, abs=0.5)


def test_whole_seconds_are_no_skew(tmp_path, monkeypatch):
    monkeypatch.setattr(probes.time, "time", lambda: 1000.9)
    touch = probes.touch

    def in_whole_seconds(path, content):
        touch(path, content)
        os.utime(path, (1000, 1000))

    monkeypatch.setattr(probes, "touch", in_whole_seconds)

    assert probes.probe_clock(tmp_path) == 0.0


def test_syncs_and_creates_are_timed(directory):
    assert latency.probe_sync(directory, 4096, SOME).count == 3
    assert latency.probe_directory_sync(directory, SOME).count == 3
    found = latency.probe_creating(directory, Often(10, 5.0))
    assert found.n_files == 10
    assert min(found.creates_per_s, found.removes_per_s) > 0


def test_what_is_slow_is_done_at_least_once(tmp_path):
    assert latency.probe_sync(tmp_path, 4096, Often(10, 0.0)).count == 1


def test_failed_sync_is_an_error(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(commit.os, "fsync", fail)

    with pytest.raises(StorageError, match="broken"):
        latency.probe_sync(tmp_path, 4096, SOME)
    with pytest.raises(StorageError, match="broken"):
        latency.probe_directory_sync(tmp_path, SOME)


def test_speed_is_of_writing_and_of_reading(tmp_path):
    found = measured_speed(tmp_path, 9 * MIB)

    assert found.nbytes == 8 * MIB
    assert min(found.write_bps, found.read_bps) > 0
    assert not list(tmp_path.iterdir())


def test_speed_on_a_full_disk_leaves_nothing(small_disk):
    with pytest.raises(StorageError):
        measured_speed(small_disk, 8 * MIB)

    assert not list(small_disk.iterdir())


MOUNTINFO = [
    "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw,errors=remount-ro",
    "22 21 0:30 / /home rw,nosuid shared:1 - nfs4 server:/home rw,vers=4.2,soft",
    "23 21 0:31 / /scratch rw - lustre 10.0.0.1@o2ib:/fs rw,flock,lazystatfs",
]


@pytest.mark.parametrize(
    ("path", "mount", "options"),
    [
        (
            "/home/ada",
            Mount(point="/home", type="nfs4", source="server:/home"),
            ("rw", "nosuid", "vers=4.2", "soft"),
        ),
        (
            "/scratch",
            Mount(point="/scratch", type="lustre", source="10.0.0.1@o2ib:/fs"),
            ("rw", "flock", "lazystatfs"),
        ),
        ("/scratch", Mount(point="/else", type="lustre", source=""), ()),
    ],
)
def test_options_are_of_mount_and_file_system(path, mount, options):
    assert find_options(MOUNTINFO, path, mount) == options


def test_options_of_a_real_mount(tmp_path):
    assert {"rw", "ro"} & {*mount_options_of(tmp_path)}
