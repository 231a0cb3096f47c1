"""Tells which file system a path lies on and what that means for I/O; reads only."""

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from mpickpt.planning.file_systems import FileSystem, kind_of
from mpickpt.storage.commit import storage_errors

MOUNTINFO = Path("/proc/self/mountinfo")

_STATFS_NBYTES = 512  # more than any struct statfs has


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted file system.

    Parameters
    ----------
    point : str
        Directory on which it is mounted.
    type : str
        As the kernel names it: "ext4", "xfs", "lustre", "nfs4", "fuse.glusterfs".
    source : str
        What is mounted: a device, "server:/export".
    """

    point: str
    type: str
    source: str


def file_system_of(path: Path) -> FileSystem:
    """Return the file system of a path, or of its nearest existing parent.

    Raises
    ------
    StorageError
        If the file system does not answer.
    """
    with storage_errors("look at the file system of", path):
        existing = _nearest_existing(path)
        block_nbytes = os.stat(existing).st_blksize
        magic = _magic_of(existing)
    mount = mount_of(existing) or Mount(point="", type="", source="")
    return FileSystem(
        kind=kind_of(magic, mount.type),
        type=mount.type,
        magic=magic,
        point=mount.point,
        source=mount.source,
        block_nbytes=block_nbytes,
    )


def mount_of(path: Path) -> Mount | None:
    """Return the file system of a path, or of its nearest existing parent.

    None where the kernel does not tell.
    """
    try:
        existing = _nearest_existing(path)
        lines = MOUNTINFO.read_text(errors="surrogateescape").splitlines()
        device = os.stat(existing).st_dev
    except OSError:
        return None
    return find_mount(lines, str(existing), f"{os.major(device)}:{os.minor(device)}")


def find_mount(lines: list[str], path: str, device: str) -> Mount | None:
    """Return the mount of an absolute path, given the lines of mountinfo.

    Parameters
    ----------
    lines : list of str
        As in proc(5): "36 35 98:0 /root /point options tags - type source super".
    path : str
        Absolute, symlinks resolved.
    device : str
        "major:minor" of the path; among mounts that hide each other it decides.
    """
    found: list[tuple[tuple[int, bool, int], Mount]] = []
    for order, line in enumerate(lines):
        fields, _, rest = line.partition(" - ")
        _, _, number, _, point, *_ = fields.split(" ")
        point = _unescaped(point)
        if path == point or path.startswith(point.rstrip("/") + "/"):
            # The longest point wins; of several mounts on one point, the last.
            priority = (len(point), number == device, order)
            kind, source, *_ = rest.split(" ")
            mount = Mount(point=point, type=kind, source=_unescaped(source))
            found.append((priority, mount))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def wants_direct(file_system: FileSystem, direct_io: str) -> bool:
    """Tell whether to go around the page cache: "on", "off", or "auto"."""
    return file_system.habits.direct_io if direct_io == "auto" else direct_io == "on"


def free_nbytes(path: Path) -> int:
    """Return the bytes that an ordinary user may still write under `path`.

    Raises
    ------
    StorageError
        If the file system does not answer.
    """
    with storage_errors("ask for the free space of", path):
        usage = os.statvfs(_nearest_existing(path))
        return usage.f_bavail * usage.f_frsize


def is_directory(path: Path) -> bool:
    """Tell whether a path leads to a directory.

    Raises
    ------
    StorageError
        If the file system does not answer. `pathlib` raises an OSError of its own.
    """
    mode = _mode_of(path, follow=True)
    return mode is not None and stat.S_ISDIR(mode)


def is_symlink(path: Path) -> bool:
    """Tell whether a path is a symbolic link; raises as `is_directory`."""
    mode = _mode_of(path, follow=False)
    return mode is not None and stat.S_ISLNK(mode)


def _mode_of(path: Path, *, follow: bool) -> int | None:
    with storage_errors("look at", path):
        try:
            return os.stat(path, follow_symlinks=follow).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            # Removed by another node since this one saw the name.
            if error.errno in (errno.ELOOP, errno.ESTALE):
                return None
            raise


def _magic_of(path: Path) -> int:
    """Return `f_type` of statfs(2), which `os.statvfs` leaves out."""
    import ctypes  # takes some milliseconds, which most commands need not

    statfs = ctypes.CDLL(None, use_errno=True).statfs
    answer = ctypes.create_string_buffer(_STATFS_NBYTES)
    if statfs(os.fsencode(path), answer):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    # Its first field, of the length of a word (statfs(2)).
    return ctypes.c_ulong.from_buffer(answer).value & 0xFFFFFFFF


def _nearest_existing(path: Path) -> Path:
    resolved = Path(os.path.realpath(path))
    for candidate in (resolved, *resolved.parents):
        if candidate.exists():
            return candidate
    return Path("/")


def _unescaped(point: str) -> str:
    r"""Undo the octal escapes of mountinfo: \040 is a space."""
    first, *rest = point.split("\\")
    return first + "".join(chr(int(text[:3], 8)) + text[3:] for text in rest)
