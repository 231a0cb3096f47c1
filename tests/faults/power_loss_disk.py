"""A disk of one's own whose power can be cut: loop-mounted, in a mount namespace.

The mounts are seen by the process that makes them and by those that it starts, and
the kernel takes them away, loop device included, when the last of these has ended:
killed ones too.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.faults.power_loss_processes import Hung, in_child

FILE_SYSTEMS = ("xfs", "ext4")
IMAGE_NBYTES = 40 << 20

# Flags of the ioctl: whether the log is written out before all ends.
LOSE_LOG, KEEP_LOG = 2, 1
_FS_IOC_SHUTDOWN = 0x8004587D

_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 0x40000

# Without the log's 64 MiB, and without the 300 MB that XFS asks for.
_MAKE = {
    "xfs": ("mkfs.xfs", "-q", "-f", "--unsupported"),
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0"),
}


@cache
def why_no_disk() -> str | None:
    """Return what this machine lacks, or None: tried out once."""
    if os.geteuid() != 0:
        return "mounting needs root"
    for file_system, (tool, *_) in _MAKE.items():
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
        try:
            in_child(_try_out, file_system, timeout_s=60)
        except (RuntimeError, Hung) as error:
            return f"no loop-mounted {file_system}: {str(error).splitlines()[-1]}"
    return None


def enter_own_namespace() -> None:
    """Let what this process mounts be seen by itself and its children alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace of one's own")
    if libc.mount(None, b"/", None, _MS_REC_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "the mount namespace stays shared")


class Disk:
    """A file system in a file.

    Parameters
    ----------
    folder : Path
        An empty or missing directory to work in.
    file_system : str
        One of `FILE_SYSTEMS`.
    image : Path, optional
        A disk to begin with; by default a new one is made.
    """

    def __init__(
        self, folder: Path, file_system: str, image: Path | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        # In memory: what is durable is decided by the file system, not by its disk.
        _run("mount", "-t", "tmpfs", "-o", "size=80m", "none", str(folder))
        self.root = folder / "disk"
        self.root.mkdir()
        self.image = folder / "image"
        self._file_system = file_system
        if image is None:
            with self.image.open("wb") as file:
                file.truncate(IMAGE_NBYTES)
            _run(*_MAKE[file_system], str(self.image))
        else:
            copy_sparse(image, self.image)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        """Mount it meanwhile."""
        self.mount()
        try:
            yield self.root
        finally:
            self.unmount()

    def mount(self) -> None:
        """Mount it."""
        # Copies of one image are mounted side by side.
        options = "loop,noatime" + (",nouuid" if self._file_system == "xfs" else "")
        _run(
            *("mount", "-t", self._file_system, "-o", options),
            *(str(self.image), str(self.root)),
        )

    def cut_power(self, flag: int) -> None:
        """Lose at once what is not on the disk; every call fails from now on."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _FS_IOC_SHUTDOWN, struct.pack("I", flag))
        finally:
            os.close(descriptor)

    def unmount(self) -> None:
        """Unmount it, once what is open on it is closed."""
        end = time.monotonic() + 10
        while True:
            try:
                return _run("umount", str(self.root))
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)  # what is going to be closed may be open still

    def close(self) -> None:
        """Give up the disk, which is not mounted."""
        _run("umount", str(self.root.parent))


def disk_at(folder: Path, file_system: str) -> Disk:
    """Return a disk that another process has made or is going to make."""
    disk = Disk.__new__(Disk)
    disk.root, disk.image = folder / "disk", folder / "image"
    disk._file_system = file_system
    return disk


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file and leave its holes holes."""
    with source.open("rb") as reader, target.open("wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        writer.truncate(size)
        offset = 0
        with contextlib.suppress(OSError):  # ENXIO: only a hole is left
            while offset < size:
                offset = os.lseek(reader.fileno(), offset, os.SEEK_DATA)
                stop = os.lseek(reader.fileno(), offset, os.SEEK_HOLE)
                os.pwrite(
                    writer.fileno(),
                    os.pread(reader.fileno(), stop - offset, offset),
                    offset,
                )
                offset = stop


def _try_out(file_system: str) -> None:
    enter_own_namespace()
    folder = Path("/mnt")
    disk = Disk(folder, file_system)
    with disk.mounted():
        disk.cut_power(LOSE_LOG)
    with disk.mounted():
        pass


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
