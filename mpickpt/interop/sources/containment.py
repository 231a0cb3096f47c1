"""Keeps the names that a foreign checkpoint gives inside its own directory; no MPI."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from mpickpt.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    ManifestError,
)
from mpickpt.storage.commit import storage_errors

_MOST_CHARACTERS = 4096
_NO_DIRECTORY = (FileNotFoundError, NotADirectoryError)


def contained(root: Path, relative: str) -> Path:
    """Return the path of a name inside a directory, which need not exist.

    Parameters
    ----------
    root : Path
        The directory of the foreign checkpoint; may itself be reached by symlinks,
        for the user named it.
    relative : str
        A name that a file of the checkpoint gave.

    Raises
    ------
    ManifestError
        If the name is absolute, leaves the directory, or leads through a symlink.
    """
    parts = _parts(root, relative)
    path = root
    for part in parts:
        path = path / part
        with storage_errors("look at", path):
            try:
                mode = os.lstat(path).st_mode
            except _NO_DIRECTORY:
                break
        if stat.S_ISLNK(mode):
            raise _symlink(root, relative, path)
    return root.joinpath(*parts)


def open_contained(root: Path, relative: str) -> int:
    """Return a descriptor of a regular file inside a directory, open to be read.

    No component is followed when it is a symlink, not even one that was put there
    since a `contained` looked.

    Raises
    ------
    ManifestError
        As `contained`.
    IncompleteCheckpointError
        If it is missing.
    StorageError
        If it is no regular file, or cannot be opened.
    """
    parts = _parts(root, relative)
    path = root.joinpath(*parts)
    with storage_errors("open", path):
        try:
            return _walk(root, parts)
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{path} is missing", path=str(path)
            ) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _symlink(root, relative, path) from error
            raise


def read_contained(root: Path, relative: str, most_nbytes: int) -> bytes:
    """Return the content of a file inside a directory, of at most so many bytes.

    Raises
    ------
    ManifestError
        As `contained`, or if it is longer.
    IncompleteCheckpointError, StorageError
        As `open_contained`.
    """
    path = root / relative
    with (
        storage_errors("read", path),
        os.fdopen(open_contained(root, relative), "rb") as file,
    ):
        content = file.read(most_nbytes + 1)
    if len(content) > most_nbytes:
        raise ManifestError(
            f"{path} has more than {most_nbytes} bytes, which no file of its kind needs"
        )
    return content


def nbytes_contained(root: Path, relative: str) -> int:
    """Return the size of a file inside a directory; raises as `open_contained`."""
    descriptor = open_contained(root, relative)
    try:
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def names_inside(directory: Path) -> set[str]:
    """Return the names in a directory.

    Raises
    ------
    CheckpointNotFoundError
        If it is none.
    StorageError
        If it cannot be read.
    """
    names = None
    with storage_errors("read", directory), suppress(*_NO_DIRECTORY):
        names = set(os.listdir(directory))
    if names is None:
        raise CheckpointNotFoundError(f"{directory} is no directory")
    return names


def _walk(root: Path, parts: tuple[str, ...]) -> int:
    # O_NONBLOCK: the open of a FIFO waits for a writer.
    directory_flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    file_flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    directory = os.open(root, directory_flags)
    try:
        for part in parts[:-1]:
            inner = os.open(part, directory_flags | os.O_NOFOLLOW, dir_fd=directory)
            os.close(directory)
            directory = inner
        descriptor = os.open(parts[-1], file_flags, dir_fd=directory)
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def _parts(root: Path, relative: str) -> tuple[str, ...]:
    parts = tuple(relative.split("/"))
    if (
        not relative
        or len(relative) > _MOST_CHARACTERS
        or "\0" in relative
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise ManifestError(
            f"{root} names a file {relative[:200]!r}, which is not a plain path inside "
            "the checkpoint: no absolute path, no empty, '.' or '..' component"
        )
    return parts


def _symlink(root: Path, relative: str, path: Path) -> ManifestError:
    return ManifestError(
        f"{root} names a file {relative!r}, but {path} is or passes a symlink, which "
        "could lead to any file; copy what it points to in its place"
    )
