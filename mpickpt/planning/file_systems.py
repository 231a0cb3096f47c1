"""Names file systems by what the kernel says of them, and says what suits each; pure.

Numbers are those that statfs(2) gives as `f_type`, masked to 32 bits. Sources:
linux/magic.h for those in the kernel; lustre_user.h (LL_SUPER_MAGIC); gpfs.h (Spectrum
Scale); the clients of BeeGFS (BEEGFS_MAGIC), WekaFS and PanFS for theirs.
"""

from dataclasses import dataclass

_FUSE_MAGIC = 0x65735546
_KIND_OF_MAGIC = {
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x00006969: "nfs",
    0x00C36400: "cephfs",
    0x18031977: "wekafs",
    0xAAD7AAEA: "panfs",
    0xFE534D42: "smb",
    0xFF534D42: "smb",
    0x01021997: "9p",
    0x01021994: "tmpfs",
    0x858458F6: "tmpfs",  # ramfs
    0x794C7630: "overlay",
    0x58465342: "xfs",
    0x0000EF53: "ext4",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
}
# What the kernel, or whoever mounts through FUSE, calls it in mountinfo.
_KIND_OF_TYPE = {
    "ceph": "cephfs",
    "ceph-fuse": "cephfs",
    "cifs": "smb",
    "smb3": "smb",
    "dfuse": "daos",
    "ext2": "ext4",
    "ext3": "ext4",
    "mfs": "moosefs",
    "mfsmount": "moosefs",
    "nfs4": "nfs",
    "ramfs": "tmpfs",
    "virtiofs": "9p",
    "zfs": "zfs",
}
_OBJECT_STORES = frozenset(
    {
        "s3fs",
        "goofys",
        "gcsfuse",
        "mountpoint-s3",
        "blobfuse2",
        "rclone",
        "geesefs",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What suits a kind of file system.

    Attributes
    ----------
    reach : {"nodes", "node", "unknown"}
        Who sees what is written: all nodes that mount it, one node alone, or it
        depends on what lies beneath.
    survives_power_loss : bool
        Whether what was synced is there after the power comes back.
    direct_io : bool
        Whether O_DIRECT is the better default. It saves a copy on local disks; on
        network file systems it also gives up write-behind, and memory has no disk.
    creates_per_s : float or None
        How many files a job should create, or open, each second at most; None where
        that is no matter.
    """

    reach: str
    survives_power_loss: bool = True
    direct_io: bool = False
    creates_per_s: float | None = None


# A job may ask for a third of what servers were seen to give, for others wait too.
# Lustre: 504 creates a second by one client, 15,000 by 240 (mdtest; Dell, Storage for
# HPC with Intel EE for Lustre, figure 12). GPFS: 68,100 by 512 clients in directories
# of their own, and reads no faster (mdtest; Dell, Ready Solution for PixStor, figure
# 19), but 1 where all nodes create in one directory (Aaditya HPC, "Using GPFS").
# CephFS: one metadata server, unless the site has more. The others: careful guesses.
_LOCAL = Habits(reach="node", direct_io=True)
_HABITS = {
    "ext4": _LOCAL,
    "xfs": _LOCAL,
    "btrfs": _LOCAL,
    "zfs": Habits(reach="node"),
    "tmpfs": Habits(reach="node", survives_power_loss=False),
    "lustre": Habits(reach="nodes", creates_per_s=5000.0),
    "gpfs": Habits(reach="nodes", creates_per_s=1000.0),
    "beegfs": Habits(reach="nodes", creates_per_s=5000.0),
    "cephfs": Habits(reach="nodes", creates_per_s=1000.0),
    "wekafs": Habits(reach="nodes", creates_per_s=5000.0),
    "panfs": Habits(reach="nodes", creates_per_s=1000.0),
    "daos": Habits(reach="nodes", creates_per_s=5000.0),
    "nfs": Habits(reach="nodes", creates_per_s=500.0),
    "smb": Habits(reach="nodes", creates_per_s=500.0),
    "glusterfs": Habits(reach="nodes", creates_per_s=500.0),
    "moosefs": Habits(reach="nodes", creates_per_s=500.0),
    "object": Habits(reach="nodes", creates_per_s=100.0),
}
_UNKNOWN = Habits(reach="unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """The file system that a directory lies on, as one node sees it.

    Attributes
    ----------
    kind : str
        "lustre", "gpfs", "nfs", "xfs", ...; "object" for an object store that is
        mounted; of one that is not known, its type or, without one, "unknown".
    type : str
        As mountinfo names it: "lustre", "nfs4", "fuse.glusterfs"; "" if it does not.
    magic : int
        `f_type` of statfs(2), 32 bits.
    point : str
        Directory on which it is mounted, "" if that is not known.
    source : str
        What is mounted: a device, "server:/export"; "" if that is not known.
    block_nbytes : int
        `st_blksize` of the directory: the length that I/O should have.
    """

    kind: str
    type: str
    magic: int
    point: str
    source: str
    block_nbytes: int

    @property
    def habits(self) -> Habits:
        """What suits it."""
        return _HABITS.get(self.kind, _UNKNOWN)

    def __str__(self) -> str:
        name = self.kind if self.kind == self.type else f"{self.kind} ({self.type})"
        return f"{name} at {self.point}" if self.point else name


def kind_of(magic: int, mount_type: str) -> str:
    """Return the kind of a file system.

    Parameters
    ----------
    magic : int
        `f_type` of statfs(2).
    mount_type : str
        Its type in mountinfo, "" if that is not known.

    Notes
    -----
    The number decides, for a container may hide mounts; but all that goes through FUSE
    has one number, and there the type in mountinfo does.
    """
    magic &= 0xFFFFFFFF
    is_fuse = magic == _FUSE_MAGIC or mount_type.partition(".")[0] == "fuse"
    if not is_fuse and magic in _KIND_OF_MAGIC:
        return _KIND_OF_MAGIC[magic]
    name = mount_type.removeprefix("fuse.").removeprefix("fuseblk.")
    if name in _OBJECT_STORES:
        return "object"
    return _KIND_OF_TYPE.get(name, name) or "unknown"
