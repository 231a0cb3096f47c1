"""Files follow umask and set-gid; who loses by that is told, and nothing is changed."""

import logging
import os
import stat

import numpy as np
import pytest

from mpickpt import CheckpointManager, Replicated, Sharded, save_sharded, set_metrics
from mpickpt.storage.permissions import permission_notes
from tests.states import on_ranks

SIZE = 3
OTHER_GROUP = 4321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root")


@pytest.fixture
def umask():
    """Set the umask of the process until the test ends."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def state(comm):
    rows = Sharded(np.full((2, 3), comm.rank), (2 * comm.size, 3), (2 * comm.rank, 0))
    return {"w": rows, "scale": Replicated(np.arange(5.0))}


def run_of(run_dir, n_steps=2):
    """Save a few steps as a run does, with all that lies beside them."""

    def train(comm):
        with CheckpointManager(
            run_dir, comm, state=lambda: state(comm), keep=2
        ) as manager:
            for step in range(n_steps):
                manager.save(step, metrics={"loss": 1.0})
            manager.pin(0)
            manager.restore_latest()

    on_ranks(SIZE, train)
    set_metrics(run_dir, 0, {"loss": 2.0})


def modes_below(folder):
    """Return path, whether it is a directory, mode and group of all below."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        is_directory = stat.S_ISDIR(status.st_mode)
        found.append((path, is_directory, stat.S_IMODE(status.st_mode), status.st_gid))
    return found


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o027, 0o077], ids="{:03o}".format)
@pytest.mark.parametrize("bit", [0, pytest.param(stat.S_ISGID, marks=needs_root)])
def test_all_of_a_run_follows_umask_and_set_gid(tmp_path, umask, mask, bit):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    group = OTHER_GROUP if bit else run_dir.stat().st_gid
    os.chown(run_dir, -1, group)
    run_dir.chmod(0o775 | bit)
    umask(mask)

    run_of(run_dir)

    found = modes_below(run_dir)
    names = {path.name for path, *_ in found}
    assert {".mpickpt", "lease", "pins", "metrics", "manifest.json"} <= names
    assert sum(name.startswith("rank") for name in names) == 2 * SIZE
    for path, is_directory, mode, gid in found:
        expected = (0o777 & ~mask) | bit if is_directory else 0o666 & ~mask
        assert (oct(mode), gid) == (oct(expected), group), path


@pytest.fixture
def made(tmp_path):
    """A run directory with one file and one directory in it."""
    directory = tmp_path / "run" / "step-0000000001"
    directory.mkdir(parents=True)
    (tmp_path / "run").chmod(0o750)
    shard = directory / "rank00000-00000000.h5"
    shard.touch()
    directory.chmod(0o750)
    shard.chmod(0o640)
    return tmp_path / "run", directory, shard


def notes_of(made):
    run_dir, *paths = made
    return permission_notes(run_dir, paths)


def test_nothing_is_said_where_the_group_reads(made):
    assert notes_of(made) == ()


@pytest.mark.parametrize(("which", "mode"), [(1, 0o700), (2, 0o600)])
def test_mode_that_shuts_out_the_group_is_told(made, which, mode):
    made[which].chmod(mode)

    [note] = notes_of(made)

    assert "open to group" in note
    assert f"{made[which]} has mode {mode:04o}, for the umask is 0" in note


@pytest.mark.parametrize("bit", [0, stat.S_ISGID])
@needs_root
def test_other_group_is_told(made, bit):
    os.chown(made[0], -1, OTHER_GROUP)
    made[0].chmod(0o750 | bit)

    [note] = notes_of(made)

    assert f"open to group {OTHER_GROUP}" in note
    assert ("had no effect" if bit else "has no set-gid bit") in note


@needs_root
def test_other_group_does_not_matter_where_all_may_read(made):
    os.chown(made[0], -1, OTHER_GROUP)
    made[1].chmod(0o755)
    made[2].chmod(0o644)

    assert notes_of(made) == ()


def test_lost_set_gid_bit_is_told(made):
    made[0].chmod(0o750 | stat.S_ISGID)

    [note] = notes_of(made)

    assert "did not take over its set-gid bit" in note


@pytest.mark.parametrize("mode", [0o700, 0o1777], ids=["private", "like /tmp"])
def test_nothing_is_said_where_no_group_is_meant(made, mode):
    made[1].chmod(0o700)
    made[0].chmod(mode)

    assert notes_of(made) == ()


def test_nothing_is_said_of_what_is_not_there(made):
    assert permission_notes(made[0] / "gone", made[1:]) == ()
    assert permission_notes(made[0], [made[0] / "gone"]) == ()


def test_save_warns_once_on_rank_0(tmp_path, umask, caplog):
    (tmp_path / "run").mkdir(mode=0o750)
    umask(0o077)

    def save_twice(comm):
        for step in (1, 2):
            path = tmp_path / "run" / f"step-{step:010d}"
            save_sharded(state(comm), path, step=step, comm=comm)

    with caplog.at_level(logging.WARNING, logger="mpickpt"):
        on_ranks(SIZE, save_twice)

    [record] = [r for r in caplog.records if "open to group" in r.message]
    assert "the umask is 0077" in record.message
