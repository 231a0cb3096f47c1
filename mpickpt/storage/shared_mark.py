"""Proves that nodes see one directory, by an empty file that one of them makes; no MPI.

Neither names nor inode numbers tell: each node may have a directory of that name on a
disk of its own, and disks that were made alike number alike. A name drawn at random is
in one directory only.
"""

import contextlib
import errno
import hashlib
import os
import socket
from pathlib import Path

import msgspec

from mpickpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from mpickpt.format.naming import mark_name
from mpickpt.planning.file_systems import FileSystem
from mpickpt.storage.catalog import read_manifest
from mpickpt.storage.commit import close_file, create_file, discard, storage_errors
from mpickpt.storage.filesystem import file_system_of, is_directory
from mpickpt.storage.second_look import SecondLook, list_afresh

VIEW_NBYTES = 16
NO_DIRECTORY = "has no such directory"

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
_KERNEL = Path("/proc/sys/kernel/random/boot_id")
# Of this thread: in a container each process may have mounts of its own.
_MOUNTS = Path("/proc/thread-self/ns/mnt")


class Witness(msgspec.Struct, frozen=True, kw_only=True):
    """Who looks at a directory, and what it lies on there.

    Attributes
    ----------
    rank : int
        The rank.
    host : str
        Its host.
    file_system : str
        Kind, mount point and source, in words.
    reach : {"nodes", "node", "unknown"}
        Who sees what lies on such a file system.
    """

    rank: int
    host: str
    file_system: str
    reach: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.file_system})"

    def encode(self) -> bytes:
        """Return the message to the other ranks."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, message: bytes) -> "Witness":
        """Return the witness that a message tells of."""
        return msgspec.json.decode(message, type=cls)


def witness(directory: Path, rank: int, host: str) -> Witness:
    """Return what this rank says of a directory, or of its nearest existing parent."""
    try:
        found = file_system_of(directory)
    except StorageError:
        words, reach = "a file system that does not answer", "unknown"
    else:
        words, reach = _in_words(found), found.habits.reach
    return Witness(rank=rank, host=host, file_system=words, reach=reach)


def own_view() -> bytes:
    """Return `VIEW_NBYTES` bytes that are equal where files look the same for sure.

    Processes of one start of one kernel that have the same mounts see the same files;
    of all others nothing is known before they look.
    """
    parts = [socket.gethostname(), *_mounts_and_root()]
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape"))
    return digest.digest()[:VIEW_NBYTES]


def make_mark(directory: Path, save_id: str) -> None:
    """Make the mark of a save, for those who look for it now; not durable.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    path = directory / mark_name(save_id)
    close_file(create_file(path), path)


def remove_mark(directory: Path, save_id: str) -> None:
    """Remove the mark of a save, as well as can be; the sweep takes what stays."""
    discard(directory / mark_name(save_id))


class MarkSearch:
    """Looks for the mark that another node has made.

    Parameters
    ----------
    directory : Path
        In which it was made.
    save_id : str
        Of the save.
    maker, own : Witness
        Who has made it, and who looks.

    Attributes
    ----------
    n_looks : int
        How often it has looked; tells other threads that it goes on.
    """

    def __init__(
        self, directory: Path, save_id: str, *, maker: Witness, own: Witness
    ) -> None:
        self.n_looks = 0
        self._directory = directory
        self._path = directory / mark_name(save_id)
        self._maker = maker
        self._own = own

    def find(self) -> None:
        """Look until the mark is there, for a few seconds.

        Raises
        ------
        StorageError
            It does not come, so this node has another directory of that name, or none;
            or the file system refuses.
        """
        look = SecondLook(self._path, is_new=True)
        while True:
            self.n_looks += 1
            try:
                with storage_errors("look for", self._path):
                    os.lstat(self._path)
                return
            except StorageError as error:
                if error.errno not in _NOT_THERE:
                    raise
                _forget_name(self._directory)
                if not look.helps(error):
                    raise self._not_shared() from error

    def _not_shared(self) -> StorageError:
        there = is_directory(self._directory)
        what = "has another directory of that name" if there else NO_DIRECTORY
        return StorageError(
            f"{self._directory} is not one directory for all nodes: {self._maker} "
            f"writes there, {self._own} {what}; "
            f"{_advice(self._maker, self._own, self._directory)}",
            path=str(self._directory),
        )


def other_sight(directory: Path, checkpoint_id: str) -> str:
    """Return what is seen from here instead of a checkpoint, "" if it is seen.

    Parameters
    ----------
    directory : Path
        Of the checkpoint.
    checkpoint_id : str
        Its id, as another node has read it.
    """
    try:
        _forget_name(directory)
        if not is_directory(directory):
            return NO_DIRECTORY
        found = read_manifest(directory).checkpoint_id
    except CheckpointNotFoundError:
        return "has another directory of that name, without a manifest"
    except CheckpointError:
        return ""  # an error of its own
    if found != checkpoint_id:
        return f"has another checkpoint there, {found}"
    return ""


def explanation(directory: Path, reader: Witness, other: Witness, sight: str) -> str:
    """Return why a rank misses files of a checkpoint whose manifest another one read.

    Parameters
    ----------
    directory : Path
        Of the checkpoint.
    reader : Witness
        Who has read the manifest.
    other : Witness
        A rank of another node.
    sight : str
        What that one sees, as `other_sight` told.
    """
    return (
        f"{directory} is not one directory for all nodes: {reader} has read its "
        f"manifest, {other} {sight}; {_advice(reader, other, directory)}"
    )


def _advice(first: Witness, other: Witness, directory: Path) -> str:
    if first.reach == "nodes" and other.reach != "nodes":
        return f"see whether the file system of {directory} is mounted on {other.host}"
    if other.reach == "nodes" and first.reach != "nodes":
        return f"see whether the file system of {directory} is mounted on {first.host}"
    return (
        "use a directory on a file system that all nodes share, not a disk or memory "
        "of each node"
    )


def _in_words(found: FileSystem) -> str:
    return f"{found}, mounted from {found.source}" if found.source else str(found)


def _mounts_and_root() -> list[str]:
    """Return what tells kernels, mounts and roots apart; of a kernel that hides it,
    a name of this process alone.
    """
    try:
        root = os.stat("/")
        kernel, mounts = _KERNEL.read_text().strip(), os.readlink(_MOUNTS)
        return [kernel, mounts, f"{root.st_dev} {root.st_ino}"]
    except OSError:
        return [str(os.getpid())]


def _forget_name(directory: Path) -> None:
    """Make this node ask the server for a directory of which it may know an older."""
    with contextlib.suppress(OSError):  # the look that follows tells what is wrong
        list_afresh(directory.parent)
