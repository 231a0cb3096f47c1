"""A save that cannot fit is refused on all ranks alike, before a byte is written."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpickpt import Sharded, StorageError, save_sharded
from tests.unit.site_tools import be_user, install, printing, stands_for

MIB = 1 << 20
TOO_LARGE = 8 * MIB
SMALL = MIB

_opened = []


def _note(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        _opened.append(arguments[0])


sys.addaudithook(_note)


@pytest.fixture
def disk(request, comm, shared_tmp_path):
    """A small file system that rank 0 mounts for all."""
    point, why_not = shared_tmp_path / "disk", None
    if comm.rank == 0:
        why_not = _mount(point, getattr(request, "param", "size=4m"))
    why_not = comm.bcast(why_not)
    if why_not:
        pytest.skip(why_not)
    yield point
    comm.barrier()
    if comm.rank == 0:
        subprocess.run(["umount", "-l", str(point)], check=True)


def _mount(point, options):
    if os.geteuid() != 0:
        return "mounting a tmpfs needs root"
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"no tmpfs can be mounted here: {done.stderr}" if done.returncode else None


def state_of(comm, nbytes):
    return {"w": Sharded.block(np.ones(nbytes // comm.size, np.uint8))}


def refusal(comm, path, nbytes):
    """Return the error of a save, which must be the same on all ranks."""
    _opened.clear()
    with pytest.raises(StorageError) as caught:
        save_sharded(state_of(comm, nbytes), path, step=1, comm=comm)
    written = [one for one in _opened if one.startswith(f"{path}/") and ".h5" in one]
    seen = comm.allgather((str(caught.value), caught.value.errno, written))
    assert len({text for text, _, _ in seen}) == 1
    assert all(not written for _, _, written in seen)
    return caught.value


def test_bytes_that_do_not_fit_are_refused_before_one_is_written(comm, disk):
    path = disk / "step-1"

    error = refusal(comm, path, TOO_LARGE)

    assert error.errno == errno.ENOSPC
    assert error.rank == (0 if comm.size > 1 else None)
    assert " free" in str(error)
    assert not path.exists()


def test_a_refused_save_can_be_followed_by_one_that_fits(comm, disk):
    refusal(comm, disk / "step-1", TOO_LARGE)

    save_sharded(state_of(comm, SMALL), disk / "step-1", step=1, comm=comm)

    assert (disk / "step-1" / "manifest.json").exists()


# One for the root, one for the checkpoint's directory, one to spare.
@pytest.mark.parametrize("disk", ["size=4m,nr_inodes=3"], indirect=True)
def test_files_that_do_not_fit_are_refused_before_one_is_made(comm, disk):
    path = disk / "step-1"

    error = refusal(comm, path, SMALL)

    assert error.errno == errno.ENOSPC
    assert "inodes" in str(error)
    assert not path.exists()


def test_a_quota_that_is_too_small_is_refused_on_all_ranks(
    comm, disk, tmp_path, monkeypatch
):
    path = disk / "step-1"
    quota = (
        "Disk quotas for user ann (uid 1000): \n"
        "server:/export  9000  0  10000  0  5  0  0  0"
    )
    install(tmp_path / "bin", "quota", printing(quota), monkeypatch)
    be_user(monkeypatch)
    monkeypatch.setattr(
        "mpickpt.storage.room.file_system_of", lambda _: stands_for("nfs", disk)
    )

    error = refusal(comm, path, 2 * SMALL)

    assert error.errno == errno.EDQUOT
    assert "the quota of user ann has 1024000 bytes free" in str(error)
    assert not Path(path).exists()
