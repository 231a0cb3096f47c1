"""What cannot fit is refused before it is written, by every limit that is known."""

import errno
import logging
import os
import subprocess
from dataclasses import dataclass

import pytest

from mpickpt.errors import StorageError
from mpickpt.planning.file_systems import FileSystem
from mpickpt.storage import space as space_module
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.quota import Quota, Quotas
from mpickpt.storage.space import require_space, space_of
from tests.unit.loop_disk import mounted
from tests.unit.site_tools import be_user, install, printing, stands_for

KIB = 1024
MIB = 1 << 20
ROW = "  /scratch   {used}   {soft}   {hard}   {grace}   {files}   0   {most}   -"


@dataclass(frozen=True)
class Ost:
    index: int
    free_nbytes: int


@pytest.fixture
def step(tmp_path):
    path = tmp_path / "run" / "step-1"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def notes(caplog):
    caplog.set_level(logging.INFO, logger=space_module.__name__)

    def texts(level):
        return [one.getMessage() for one in caplog.records if one.levelno == level]

    return texts


def lustre(tmp_path, step, monkeypatch, **row):
    be_user(monkeypatch)
    values = {"used": 0, "soft": 0, "hard": 0, "grace": "-", "files": 0, "most": 0}
    row = ROW.format(**(values | row))
    script = f'case "$*" in *" -u "*) {printing(row)};; esac\n'
    nothing = printing(ROW.format(**values))
    install(tmp_path / "bin", "lfs", script + nothing, monkeypatch)
    return stands_for("lustre", step)


def refused(directory, file_system, **needed):
    with pytest.raises(StorageError) as caught:
        require_space(directory, file_system, **needed)
    assert caught.value.path == str(directory)
    return caught.value


def usage(monkeypatch, **values):
    real = os.statvfs("/")
    fields = {
        name: values.get(name, getattr(real, name))
        for name in dir(real)
        if name.startswith("f_")
    }
    monkeypatch.setattr(os, "statvfs", lambda _: type("Usage", (), fields)())


def test_a_full_memory_disk_refuses_what_does_not_fit(small_disk):
    (small_disk / "filler").write_bytes(bytes(3 * MIB))
    file_system = file_system_of(small_disk)

    error = refused(small_disk, file_system, nbytes=2 * MIB, n_files=3)

    assert error.errno == errno.ENOSPC
    assert f"needs {2 * MIB} bytes in 3 files" in str(error)
    assert f"tmpfs at {small_disk} has {MIB} bytes free" in str(error)
    assert "remove older checkpoints (mpickpt prune) or save elsewhere" in str(error)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "more").write_bytes(bytes(2 * MIB))


def test_what_fits_exactly_is_not_refused(small_disk):
    (small_disk / "filler").write_bytes(bytes(3 * MIB))

    require_space(small_disk, file_system_of(small_disk), nbytes=MIB, n_files=1)

    (small_disk / "more").write_bytes(bytes(MIB))


@pytest.mark.parametrize("small_disk", ["4m,nr_inodes=5"], indirect=True)
def test_a_disk_without_inodes_refuses_more_files_than_it_can_have(small_disk):
    file_system = file_system_of(small_disk)
    require_space(small_disk, file_system, nbytes=1, n_files=4)

    error = refused(small_disk, file_system, nbytes=1, n_files=5)

    assert error.errno == errno.ENOSPC
    assert "room for 4 more files (inodes)" in str(error)
    for number in range(4):
        (small_disk / str(number)).touch()
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "one more").touch()


@pytest.mark.parametrize("small_disk", ["0,nr_inodes=0"], indirect=True)
def test_a_disk_that_counts_nothing_refuses_nothing(small_disk, notes):
    space = space_of(small_disk, file_system_of(small_disk))

    require_space(small_disk, file_system_of(small_disk), nbytes=MIB, n_files=1000)

    assert (space.free_nbytes, space.free_inodes) == (None, None)
    assert "the file system does not count it" in notes(logging.INFO)[0]


def test_a_limit_of_a_btrfs_subvolume_refuses_what_the_disk_had_room_for(tmp_path):
    with mounted(tmp_path, "mkfs.btrfs -q") as disk:
        step = disk / "run"
        step.mkdir()
        for command in ("quota enable", "qgroup limit 16m"):
            subprocess.run(["btrfs", *command.split(), str(disk)], check=True)
        file_system = file_system_of(step)
        require_space(step, file_system, nbytes=8 * MIB, n_files=1)

        error = refused(step, file_system, nbytes=20 * MIB, n_files=1)

        assert error.errno == errno.EDQUOT
        assert "quota of project qgroup 0/5" in str(error)
        with (
            pytest.raises(OSError, match="quota exceeded"),
            open(step / "x", "wb", buffering=0) as file,
        ):
            for _ in range(20):
                file.write(bytes(MIB))


def test_blocks_that_are_kept_for_root_count_for_root_alone(tmp_path, monkeypatch):
    with mounted(tmp_path, "mkfs.ext4 -q -m 50") as disk:
        file_system = file_system_of(disk)
        root = space_of(disk, file_system).free_nbytes
        be_user(monkeypatch)

        user = space_of(disk, file_system).free_nbytes

        assert root - user > 100 * MIB


def test_servers_do_not_tell_what_root_may_write(step, monkeypatch):
    be_user(monkeypatch, user=0, group=0)
    usage(monkeypatch, f_blocks=100, f_bfree=50, f_bavail=40, f_frsize=4096)

    space = space_of(step, stands_for("beegfs", step))

    assert space.free_nbytes == 40 * 4096
    assert space.total_nbytes == 100 * 4096


@pytest.mark.parametrize(
    ("files", "free", "known"), [(100, 7, 7), (0, 0, None), (2**64 - 1, 2**63, None)]
)
def test_inodes_are_unknown_where_none_are_counted(
    step, monkeypatch, files, free, known
):
    usage(monkeypatch, f_files=files, f_favail=free, f_ffree=free)

    assert space_of(step, stands_for("nfs", step)).free_inodes == known


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            {"used": 10240, "hard": 20480},
            f"the quota of user 1000 has {10 * MIB} bytes free, {10 * MIB} of "
            f"{20 * MIB} used (lfs quota)",
        ),
        (
            {"used": "21000*", "hard": 20480},
            f"the quota of user 1000 has 0 bytes free, {21000 * KIB} of {20 * MIB}",
        ),
        (
            {"used": "10240*", "soft": 9000, "hard": 90000, "grace": "none"},
            "the quota of user 1000 has 0 bytes free",
        ),
        (
            {"files": 98, "most": 100},
            "the quota of user 1000 has 2 files free, 98 of 100 used (lfs quota)",
        ),
    ],
    ids=["short", "passed", "grace over", "files"],
)
def test_a_quota_refuses_what_it_has_no_room_for(
    step, tmp_path, monkeypatch, row, text
):
    file_system = lustre(tmp_path, step, monkeypatch, **row)

    error = refused(step, file_system, nbytes=11 * MIB, n_files=3)

    assert error.errno == errno.EDQUOT
    assert text in str(error)
    assert "ask for a larger quota" in str(error)


def test_a_quota_of_zero_is_no_limit(step, tmp_path, monkeypatch, notes):
    file_system = lustre(tmp_path, step, monkeypatch, used=10240)

    require_space(step, file_system, nbytes=11 * MIB, n_files=3)

    assert notes(logging.WARNING) == []


@pytest.mark.parametrize(
    ("user", "room"), [(1000, 10 * MIB), (0, 1000 * MIB)], ids=["user", "root"]
)
def test_room_is_what_the_narrowest_limit_leaves(
    step, tmp_path, monkeypatch, user, room
):
    file_system = lustre(tmp_path, step, monkeypatch, used=10240, hard=20480)
    be_user(monkeypatch, user=user)
    usage(monkeypatch, f_blocks=9000, f_bavail=1000, f_frsize=MIB)

    assert space_of(step, file_system).room_nbytes == room


def test_a_soft_limit_in_its_grace_period_is_a_warning_once(
    step, tmp_path, monkeypatch, notes
):
    row = {"used": "10240*", "soft": 9000, "hard": 90000, "grace": "6d23h"}
    file_system = lustre(tmp_path, step, monkeypatch, **row)
    beside = step.parent / "step-2"
    beside.mkdir()

    require_space(step, file_system, nbytes=11 * MIB, n_files=3)
    require_space(beside, file_system, nbytes=11 * MIB, n_files=3)

    (note,) = notes(logging.WARNING)
    assert f"{21 * MIB} bytes are more than the soft limit of user 1000" in note


def test_root_is_not_refused_by_quotas_that_do_not_bind_it(step, tmp_path, monkeypatch):
    file_system = lustre(tmp_path, step, monkeypatch, used=10240, hard=20480)
    be_user(monkeypatch, user=0, group=0)

    require_space(step, file_system, nbytes=11 * MIB, n_files=3)


def test_a_quota_that_was_short_is_asked_for_again(step, tmp_path, monkeypatch):
    file_system = lustre(tmp_path, step, monkeypatch, used=20000, hard=20480)
    refused(step, file_system, nbytes=MIB, n_files=3)

    file_system = lustre(tmp_path, step, monkeypatch, used=10000, hard=20480)

    require_space(step, file_system, nbytes=MIB, n_files=3)


def test_all_that_is_short_is_told_and_a_full_disk_before_a_quota(
    step, tmp_path, monkeypatch
):
    file_system = lustre(tmp_path, step, monkeypatch, used=0, hard=1, most=1)
    usage(monkeypatch, f_blocks=9, f_bavail=1, f_frsize=4096, f_files=9, f_favail=2)

    error = refused(step, file_system, nbytes=MIB, n_files=3)

    assert error.errno == errno.ENOSPC
    for text in ("4096 bytes free", "2 more files", "1024 bytes free", "1 files free"):
        assert text in str(error)


def test_what_is_not_known_is_said_once_for_a_run(step, monkeypatch, notes):
    be_user(monkeypatch)
    monkeypatch.setenv("PATH", str(step))
    beside = step.parent / "step-2"
    beside.mkdir()

    for path in (step, beside, step):
        require_space(path, stands_for("lustre", step), nbytes=1, n_files=1)

    (note,) = notes(logging.INFO)
    assert "quota of the user: lfs quota does not tell" in note
    assert "quota of the group: lfs quota does not tell" in note


def test_osts_that_are_full_in_sum_refuse(step):
    osts = [Ost(0, MIB), Ost(1, MIB)]

    error = refused(
        step, stands_for("tmpfs", step), nbytes=3 * MIB, n_files=30, osts=osts
    )

    assert error.errno == errno.ENOSPC
    assert f"the 2 OSTs it may use have {2 * MIB} bytes free in all" in str(error)


def test_one_ost_that_cannot_take_a_shard_is_a_warning(step, notes):
    osts = [Ost(0, 90 * MIB), Ost(7, MIB), Ost(8, 2 * MIB)]

    require_space(
        step, stands_for("tmpfs", step), nbytes=12 * MIB, n_files=4, osts=osts
    )

    (note,) = notes(logging.WARNING)
    assert f"2 of 3 OSTs have less than the {3 * MIB} bytes of a shard" in note
    assert f"OST 7 {MIB}" in note


def test_of_a_project_whose_quota_is_known_the_whole_disk_is_looked_at(
    step, monkeypatch
):
    project = Quota(kind="project", name="42", source="quotactl", soft_nbytes=MIB)
    monkeypatch.setattr(
        space_module, "quotas_of", lambda *_, **__: Quotas(known=(project,))
    )
    asked = []
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: asked.append(path) or real(path))

    space_of(step, stands_for("xfs", step.parent))

    assert asked == [step.parent]


def test_a_file_system_that_does_not_answer_is_an_error(tmp_path):
    nowhere = FileSystem(
        kind="tmpfs", type="tmpfs", magic=0, point="", source="", block_nbytes=4096
    )

    with pytest.raises(StorageError, match="cannot ask for the free space"):
        space_of(tmp_path / "gone", nowhere)
