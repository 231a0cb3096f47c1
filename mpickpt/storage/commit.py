"""Makes files durable and visible; the only owner of fsync and rename."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from mpickpt.errors import StorageError
from mpickpt.storage.second_look import SecondLook


@contextlib.contextmanager
def storage_errors(action: str, path: Path | str) -> Iterator[None]:
    """Raise every OSError of the body as a StorageError that names the path.

    Parameters
    ----------
    action : str
        What the body does, as in "cannot {action} {path}".
    path : Path or str
        File or directory that it is done to.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"cannot {action} {path}: {reason}"
        raise StorageError(message, errno=error.errno, path=str(path)) from error


def create_file(path: Path) -> int:
    """Create a file that must not exist yet and return its descriptor.

    Notes
    -----
    Neither the file nor its name is durable when it returns.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with storage_errors("create", path):
        return os.open(path, flags, 0o666)


def sync_file(descriptor: int, path: Path) -> None:
    """Make the bytes of an open file durable.

    Notes
    -----
    A failure condemns the file. Linux marks the lost pages clean, so a second
    fsync would succeed without having written them: it is never retried.
    """
    with storage_errors("sync", path):
        os.fsync(descriptor)


def close_file(descriptor: int, path: Path) -> None:
    """Close a file that was written.

    Notes
    -----
    A quota or a lost server may be reported here for the first time.
    """
    with storage_errors("close", path):
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: created, renamed and removed ones."""
    with storage_errors("sync directory", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and those above it that are missing, durably.

    Notes
    -----
    For one process at a time: concurrent calls from many ranks of a parallel file
    system fight for its locks. A directory that exists is left as it is.
    """
    missing = []
    while not _is_directory(path):
        missing.append(path)
        path = path.parent
    if missing:
        _sync_name_if_empty(path)
    for directory in reversed(missing):
        with storage_errors("make directory", directory):
            _make_or_meet(directory)
        sync_directory(directory.parent)


def _sync_name_if_empty(directory: Path) -> None:
    """Make the name of a directory durable in which nothing is yet.

    Whoever made it may have been killed before the sync, and all that is going to be
    in it would go with it. Something is made in it only after that sync.
    """
    try:
        with storage_errors("list", directory):
            if os.listdir(directory):
                return
        sync_directory(directory.parent)
    except StorageError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):  # not ours to list or sync
            raise


def _make_or_meet(directory: Path) -> None:
    look = SecondLook(directory)
    while True:
        try:
            _make_unless_there(directory)
            return
        except OSError as error:
            # This node may not see yet what another one has made, or may know the
            # parent by a handle that the server forgot. A brick of GlusterFS also says
            # that a directory exists which it then has not, while others look for it.
            if not look.helps(error):
                raise


def _make_unless_there(directory: Path) -> None:
    try:
        directory.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise


def write_new_file(path: Path, content: bytes) -> None:
    """Create a small file with this content and make its bytes durable.

    Notes
    -----
    Its name is durable after `sync_directory` of its parent or `publish`. After a
    failure the file is removed.
    """
    descriptor = create_file(path)
    try:
        try:
            _write_all(descriptor, content, path)
            sync_file(descriptor, path)
        finally:
            close_file(descriptor, path)
    except BaseException:
        discard(path)
        raise


def publish(tmp: Path, final: Path) -> None:
    """Give a durable file its final name, durably, in the same directory.

    Notes
    -----
    The rename survives a power cut only after its directory was synced. A file
    that had the final name is replaced at once, as seen by every reader.
    """
    rename(tmp, final)
    sync_directory(final.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a file or directory; durable after its directories were synced."""
    with storage_errors(f"rename to {target.name}", source):
        os.rename(source, target)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or directory and make both of its names durable."""
    rename(source, target)
    sync_directory(target.parent)
    if source.parent != target.parent:
        sync_directory(source.parent)


def unlink_durably(path: Path) -> None:
    """Remove a file, if it is there, and make that durable."""
    with storage_errors("remove", path), contextlib.suppress(FileNotFoundError):
        path.unlink()
    sync_directory(path.parent)


def discard(path: Path) -> None:
    """Remove a temporary file as well as can be; the sweep takes what stays."""
    with contextlib.suppress(OSError):
        path.unlink()


def _is_directory(path: Path) -> bool:
    with storage_errors("look for directory", path):
        return path.is_dir()


def _write_all(descriptor: int, content: bytes, path: Path) -> None:
    rest = memoryview(content)
    with storage_errors("write", path):
        while rest:
            rest = rest[os.write(descriptor, rest) :]
