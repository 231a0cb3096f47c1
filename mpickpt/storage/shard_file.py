"""Moves bytes between memory and one open file, with or without the page cache."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from mpickpt.errors import IncompleteCheckpointError, StorageError
from mpickpt.storage.commit import close_file, create_file, discard, storage_errors
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.second_look import SecondLook

# Covers the logical block of every disk, and the page.
DIRECT_ALIGNMENT = 4096

# A symlink, a socket or FIFO or device, a directory, a file in place of a directory.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
Identity = tuple[int, int]
_Opened = tuple[int, os.stat_result]

_O_DIRECT = getattr(os, "O_DIRECT", 0)


class ShardFile:
    """An open file at whose offsets threads may read or write at the same time.

    Parameters
    ----------
    descriptor : int
        The open file.
    path : Path
        Its path, for errors.
    nbytes : int
        Size that the file has, or is going to have.
    direct : bool
        Whether to go around the page cache, where the file system can. Buffers,
        their lengths and offsets must then be aligned; the end of the file is not.
    identity : tuple of int, optional
        Device and inode of a file that is read.
    """

    def __init__(
        self,
        descriptor: int,
        path: Path,
        *,
        nbytes: int,
        direct: bool,
        identity: Identity | None = None,
    ) -> None:
        self.descriptor = descriptor
        self.path = path
        self.nbytes = nbytes
        self._identity = identity
        self._is_direct = False
        if direct and _O_DIRECT:
            # At open, some file systems create the file before they refuse the flag.
            with contextlib.suppress(OSError):
                self._set_flags(self._flags() | _O_DIRECT)
                self._is_direct = True

    def write_at(self, view: memoryview, offset: int) -> None:
        """Write all of `view` at `offset`."""
        done = 0
        with storage_errors("write", self.path):
            if len(view) % DIRECT_ALIGNMENT:
                self._leave_direct()
            while done < len(view):
                count = self._call(os.pwrite, view[done:], offset + done)
                done += self._progress(count, "the file system takes no more bytes")

    def read_at(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`, or as much of it as the file has."""
        done, needed = 0, min(len(view), self.nbytes - offset)
        look = SecondLook(self.path)
        with storage_errors("read", self.path):
            while done < needed:
                try:
                    count = self._call(_pread_into, view[done:], offset + done)
                except OSError as error:
                    if error.errno != errno.ESTALE or not look.helps(error):
                        raise
                    self._open_again(error)
                    continue
                if done + count >= needed:
                    return
                done += self._progress(count, "the file was cut while it was read")

    def _open_again(self, stale: OSError) -> None:
        """Take a new handle of the same file in place of one that a server forgot."""
        try:
            descriptor = _open_regular(self.path)
        except (IncompleteCheckpointError, StorageError) as error:
            raise stale from error
        try:
            if _identity(os.fstat(descriptor)) != self._identity:
                raise stale
            # Other threads read at the same time; this changes the file under them.
            os.dup2(descriptor, self.descriptor, inheritable=False)
            if self._is_direct:
                self._set_flags(self._flags() | _O_DIRECT)
        finally:
            os.close(descriptor)

    def _call(
        self,
        transfer: Callable[[int, memoryview, int], int],
        view: memoryview,
        offset: int,
    ) -> int:
        # Asked before: of several transfers that fail, another may have left it since.
        was_direct = self._is_direct
        try:
            return transfer(self.descriptor, view, offset)
        except OSError as error:
            # Some file systems accept the flag and refuse the first transfer.
            if error.errno != errno.EINVAL or not was_direct:
                raise
            self._leave_direct()
            return transfer(self.descriptor, view, offset)

    def _progress(self, count: int, complaint: str) -> int:
        # After a short direct transfer, going on from where it ended is EINVAL.
        was_direct = self._is_direct
        aligned = count - count % DIRECT_ALIGNMENT if was_direct else count
        if not aligned:
            if not was_direct:
                raise OSError(errno.EIO, complaint)
            self._leave_direct()
        return aligned

    def _leave_direct(self) -> None:
        """Go through the page cache from now on."""
        if self._is_direct:
            self._set_flags(self._flags() & ~_O_DIRECT)
            self._is_direct = False

    def _flags(self) -> int:
        return fcntl.fcntl(self.descriptor, fcntl.F_GETFL)

    def _set_flags(self, flags: int) -> None:
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags)


@contextlib.contextmanager
def new_shard_file(path: Path, *, nbytes: int, direct: bool) -> Iterator[ShardFile]:
    """Create a file to be written; remove it when the body or its close fails."""
    descriptor = create_file(path)
    try:
        try:
            yield ShardFile(descriptor, path, nbytes=nbytes, direct=direct)
        finally:
            close_file(descriptor, path)
    except BaseException:
        discard(path)
        raise


@contextlib.contextmanager
def open_shard_file(
    path: Path, *, nbytes: int | None = None, direct: bool, is_new: bool = False
) -> Iterator[ShardFile]:
    """Open a file to be read, which must be a regular one, of this size if given.

    One that another node has just made, `is_new`, may come late.

    Raises
    ------
    IncompleteCheckpointError
        If it is missing or has another size.
    StorageError
        If it is a symlink, a FIFO or a device, or cannot be opened.
    """
    look = SecondLook(path, is_new=is_new)
    descriptor, found = _open_when_seen(path, nbytes, look)
    try:
        yield ShardFile(
            descriptor,
            path,
            nbytes=found.st_size,
            direct=direct,
            identity=_identity(found),
        )
    finally:
        _close_read(descriptor)


def wrong_size(
    path: Path | RemotePath, wanted: str, expected: int | None, actual: int
) -> IncompleteCheckpointError:
    """Return the error for a file that has not the bytes that it should have."""
    return IncompleteCheckpointError(
        f"{path} has {actual} bytes; expected are {wanted}",
        path=str(path),
        expected=expected,
        actual=actual,
    )


def is_no_file(error: Exception) -> bool:
    """Tell whether something else, a symlink too, stands where a file was saved.

    That is damage: unlike a file system that refuses, it would refuse for ever.
    """
    return isinstance(error, StorageError) and error.errno in _NO_FILE


def _open_when_seen(path: Path, nbytes: int | None, look: SecondLook) -> _Opened:
    while True:
        try:
            return _open_of_size(path, nbytes)
        except (IncompleteCheckpointError, StorageError) as error:
            if not look.helps(error):
                raise


def _open_of_size(path: Path, nbytes: int | None) -> _Opened:
    descriptor = _open_regular(path)
    try:
        with storage_errors("look at", path):
            found = os.fstat(descriptor)
        if nbytes not in (None, found.st_size):
            raise wrong_size(path, f"{nbytes}", nbytes, found.st_size)
    except BaseException:
        _close_read(descriptor)
        raise
    return descriptor, found


def _open_regular(path: Path) -> int:
    # O_NONBLOCK: opening a FIFO that nobody writes would wait for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with storage_errors("open", path):
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError as error:
            message = f"{path} is missing"
            raise IncompleteCheckpointError(message, path=str(path)) from error
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        _close_read(descriptor)
        number = errno.EISDIR if is_directory else errno.ENXIO
        raise OSError(number, "not a regular file")


def _close_read(descriptor: int) -> None:
    """Close a file that was read, whose bytes are here whatever the close says.

    Linux frees the descriptor of a close that fails.
    """
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def _pread_into(descriptor: int, view: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [view], offset)
