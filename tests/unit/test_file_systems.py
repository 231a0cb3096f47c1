"""The names of file systems, and what suits each."""

import pytest

from mpickpt.planning.file_systems import FileSystem, kind_of

FUSE = 0x65735546


@pytest.mark.parametrize(
    ("magic", "mount_type", "kind"),
    [
        (0x0BD00BD0, "lustre", "lustre"),
        (0x47504653, "gpfs", "gpfs"),
        (0x19830326, "beegfs", "beegfs"),
        (0x6969, "nfs4", "nfs"),
        (0x6969, "nfs", "nfs"),
        (0x00C36400, "ceph", "cephfs"),
        (FUSE, "fuse.ceph-fuse", "cephfs"),
        (0x18031977, "wekafs", "wekafs"),
        (FUSE, "fuse.daos", "daos"),
        (FUSE, "fuse.dfuse", "daos"),
        (FUSE, "fuse.glusterfs", "glusterfs"),
        (FUSE, "fuse.mfs", "moosefs"),
        (FUSE, "fuse.lustre", "lustre"),
        (FUSE, "fuse.sshfs", "sshfs"),
        (FUSE, "fuse.mountpoint-s3", "object"),
        (FUSE, "fuse", "fuse"),
        (FUSE, "", "unknown"),
        (0x01021994, "tmpfs", "tmpfs"),
        (0x858458F6, "rootfs", "tmpfs"),
        (0x58465342, "xfs", "xfs"),
        (0xEF53, "ext4", "ext4"),
        (0xEF53, "ext3", "ext4"),
        (0x794C7630, "overlay", "overlay"),
        (0x9123683E, "btrfs", "btrfs"),
        (0xAAD7AAEA, "panfs", "panfs"),
        (0xFE534D42, "cifs", "smb"),
        # The number decides: a container may hide or rename mounts.
        (0x47504653, "ext4", "gpfs"),
        # A number that a 32-bit long has made negative.
        (0x47504653 - 2**32, "", "gpfs"),
        (0x12345678, "newfs", "newfs"),
        (0x12345678, "", "unknown"),
    ],
)
def test_kinds(magic, mount_type, kind):
    assert kind_of(magic, mount_type) == kind


def file_system(kind, mount_type="", point="/scratch"):
    return FileSystem(
        kind=kind,
        type=mount_type or kind,
        magic=0,
        point=point,
        source="",
        block_nbytes=4096,
    )


def test_direct_io_is_for_local_disks():
    direct = {
        k
        for k in (
            "ext4",
            "xfs",
            "btrfs",
            "nfs",
            "lustre",
            "gpfs",
            "tmpfs",
            "overlay",
            "unknown",
        )
        if file_system(k).habits.direct_io
    }
    assert direct == {"ext4", "xfs", "btrfs"}


@pytest.mark.parametrize(
    ("kind", "reach"),
    [
        ("lustre", "nodes"),
        ("gpfs", "nodes"),
        ("nfs", "nodes"),
        ("ext4", "node"),
        ("tmpfs", "node"),
        ("overlay", "unknown"),
        ("sshfs", "unknown"),
    ],
)
def test_reach(kind, reach):
    assert file_system(kind).habits.reach == reach


def test_only_memory_forgets_without_power():
    assert not file_system("tmpfs").habits.survives_power_loss
    assert file_system("nfs").habits.survives_power_loss


def test_text():
    assert str(file_system("lustre")) == "lustre at /scratch"
    assert str(file_system("nfs", "nfs4")) == "nfs (nfs4) at /scratch"
    assert str(file_system("unknown", point="")) == "unknown"
