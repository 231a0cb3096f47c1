"""Removes checkpoints; one process, files only, no MPI.

The manifest goes first, durably: from then on no reader takes the rest for a
checkpoint, and a crash leaves rubbish that the next sweep takes. Only files with names
of this library's own making are removed, so a directory that holds others stays.
"""

import contextlib
import errno
import logging
from collections.abc import Iterable
from pathlib import Path

from mpickpt.errors import StorageError
from mpickpt.format.naming import (
    MANIFEST_NAME,
    is_own_file,
    parse_shard_name,
    parse_shard_subdirectory,
)
from mpickpt.storage.catalog import PathLike
from mpickpt.storage.commit import storage_errors, unlink_durably
from mpickpt.storage.filesystem import is_directory, is_symlink
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.run_entry import RejectedEntry
from mpickpt.storage.small_file import is_there, names_in

log = logging.getLogger(__name__)

KEPT_REJECTED = 2


def remove_checkpoint(directory: PathLike) -> bool:
    """Remove a checkpoint, or what is left of one; tell whether its directory went.

    Parameters
    ----------
    directory : path-like
        Of the checkpoint; a symbolic link is refused.

    Raises
    ------
    StorageError
        If the file system refuses; the checkpoint may be unpublished by then.

    Notes
    -----
    Not collective. That it is not published any more is durable when this returns.
    """
    path = Path(directory)
    remove_files(unpublish(path))
    return remove_directory_if_empty(path)


def unpublish(directory: Path) -> list[Path]:
    """Take the manifest away and return the files that may be removed now.

    Raises
    ------
    StorageError
        If the directory cannot be listed, is a symbolic link, or the manifest
        cannot be removed.

    Notes
    -----
    Not collective; the files may be shared out over ranks. Durable when it returns:
    the checkpoint is not published any more.
    """
    if is_symlink(directory):
        raise StorageError(
            f"{directory} is a symbolic link: what it leads to is not removed; remove "
            "the link itself if it should go",
            errno=errno.ELOOP,
            path=str(directory),
        )
    files = own_files(directory)
    unlink_durably(directory / MANIFEST_NAME)
    return files


def remove_files(paths: Iterable[Path]) -> None:
    """Remove files, those that are gone already included.

    Raises
    ------
    StorageError
        For the first that could not be removed, after all were tried.
    """
    failures = []
    for path in paths:
        try:
            with storage_errors("remove", path), contextlib.suppress(FileNotFoundError):
                path.unlink()
        except StorageError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def remove_directory_if_empty(directory: Path) -> bool:
    """Remove a checkpoint's directories as far as they are empty.

    Returns
    -------
    bool
        Whether it is gone. It stays where it holds files of others.
    """
    for name in names_in(directory):
        if parse_shard_subdirectory(name) is not None:
            with contextlib.suppress(OSError):
                (directory / name).rmdir()
    with contextlib.suppress(OSError):
        directory.rmdir()
    return not is_there(directory)


def own_files(directory: Path) -> list[Path]:
    """Return the files in a checkpoint's directory that are this library's.

    Written ones and those being written, the manifest excepted.
    """
    found = [directory / name for name in names_in(directory) if is_own_file(name)]
    for name in names_in(directory):
        inner = directory / name
        is_shard_directory = parse_shard_subdirectory(name) is not None
        if is_shard_directory and is_directory(inner) and not is_symlink(inner):
            found += [inner / n for n in names_in(inner) if parse_shard_name(n)]
    return sorted(found)


def remove_old_rejected(run: RunDirectory) -> None:
    """Remove all checkpoints that were set aside but the newest few and pinned ones.

    Notes
    -----
    For the holder of the lease. What the file system refuses is logged.
    """
    removable = [entry for entry in run.rejected() if not entry.is_pinned]
    for entry in removable[:-KEPT_REJECTED]:
        try:
            remove_rejected(run, entry)
        except StorageError as error:
            log.warning("%s was not swept: %s", entry.path, error)


def remove_rejected(run: RunDirectory, entry: RejectedEntry) -> bool:
    """Remove a checkpoint that was set aside; tell whether its directory went."""
    is_gone = remove_checkpoint(entry.path)
    if is_gone:
        run.forget_rejected(entry)
    return is_gone
