"""What the library knows of the file system below a path."""

from pathlib import Path

import pytest

from mpickpt.storage.filesystem import (
    Mount,
    file_system_of,
    find_mount,
    free_nbytes,
    mount_of,
    wants_direct,
)

MOUNTINFO = [
    "21 1 254:0 / / rw,relatime - ext4 /dev/vda rw",
    "22 21 0:30 / /scratch rw shared:1 - lustre 10.0.0.1@o2ib:/fs rw",
    "23 22 0:31 / /scratch/my\\040run rw - tmpfs tmpfs rw",
    "24 21 0:32 / /data rw - nfs4 server:/old rw",
    "25 24 0:33 / /data rw - xfs /dev/vdb rw",
]


@pytest.mark.parametrize(
    ("path", "device", "kind"),
    [
        ("/home/user", "254:0", "ext4"),
        ("/scratch", "0:30", "lustre"),
        ("/scratch/deep/er", "0:30", "lustre"),
        ("/scratch-of-another", "254:0", "ext4"),
        ("/scratch/my run/x", "0:31", "tmpfs"),
        ("/data/x", "0:33", "xfs"),
        ("/data/x", "0:32", "nfs4"),
    ],
)
def test_find_mount_takes_the_nearest_mount_of_the_device(path, device, kind):
    assert find_mount(MOUNTINFO, path, device).type == kind


def test_find_mount_undoes_escapes():
    found = find_mount(MOUNTINFO, "/scratch/my run", "0:31")

    assert found == Mount(point="/scratch/my run", type="tmpfs", source="tmpfs")


def test_memory_file_systems_have_no_direct_io():
    assert mount_of(Path("/proc/self")).type == "proc"
    proc = file_system_of(Path("/proc/self"))
    assert proc.kind == "proc"
    assert not wants_direct(proc, "auto")
    assert wants_direct(proc, "on")


def test_a_path_that_is_still_to_be_made_is_on_the_disk_of_its_parent(tmp_path):
    later = tmp_path / "run" / "step"

    assert mount_of(later) == mount_of(tmp_path)
    assert file_system_of(later) == file_system_of(tmp_path)
    assert free_nbytes(later) > 0
