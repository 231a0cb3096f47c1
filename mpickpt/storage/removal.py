"""Removes checkpoints from directories and stores; one process, no MPI.

The manifest goes first, durably: from then on no reader takes the rest for a
checkpoint, and a crash leaves rubbish that the next sweep takes. Only files with names
of this library's own making are removed, so a directory that holds others stays.
"""

import contextlib
import errno
import logging
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import overload

from mpickpt.errors import StorageError
from mpickpt.format.naming import MANIFEST_NAME, parse_shard_subdirectory
from mpickpt.storage.commit import storage_errors, unlink_durably
from mpickpt.storage.contents import own_files
from mpickpt.storage.filesystem import is_symlink
from mpickpt.storage.places import Place, PlaceLike, is_there
from mpickpt.storage.remote_path import RemotePath, parse_place
from mpickpt.storage.run_entry import RejectedEntry, Run
from mpickpt.storage.small_file import names_in

__all__ = [
    "KEPT_REJECTED",
    "own_files",
    "remove_checkpoint",
    "remove_directory_if_empty",
    "remove_files",
    "remove_old_rejected",
    "remove_rejected",
    "unpublish",
]

log = logging.getLogger(__name__)

KEPT_REJECTED = 2


def remove_checkpoint(directory: PlaceLike) -> bool:
    """Remove a checkpoint, or what is left of one; tell whether its directory went.

    Parameters
    ----------
    directory : path-like or URL
        Of the checkpoint; a symbolic link is refused.

    Raises
    ------
    StorageError
        If the file system or the store refuses; the checkpoint may be unpublished by
        then.

    Notes
    -----
    Not collective. That it is not published any more is durable when this returns.
    """
    path = parse_place(directory)
    remove_files(unpublish(path))
    return remove_directory_if_empty(path)


@overload
def unpublish(directory: Path) -> list[Path]: ...


@overload
def unpublish(directory: RemotePath) -> list[RemotePath]: ...


def unpublish(directory: Place) -> list[Path] | list[RemotePath]:
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
    if isinstance(directory, RemotePath):
        stored = own_files(directory)
        _remove_stored([directory / MANIFEST_NAME])
        return stored
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


def remove_files(paths: Iterable[Place]) -> None:
    """Remove files of one file system or store, those that are gone already included.

    Raises
    ------
    StorageError
        For the first that could not be removed, after all were tried.
    """
    failures, stored = [], []
    for path in paths:
        if isinstance(path, RemotePath):
            stored.append(path)
            continue
        try:
            with storage_errors("remove", path), contextlib.suppress(FileNotFoundError):
                path.unlink()
        except StorageError as error:
            failures.append(error)
    _remove_stored(stored)
    if failures:
        raise failures[0]


def remove_directory_if_empty(directory: Place) -> bool:
    """Remove a checkpoint's directories as far as they are empty.

    A store has none; there, what unfinished uploads have sent is given up.

    Returns
    -------
    bool
        Whether it is gone. It stays where it holds files of others.
    """
    if isinstance(directory, RemotePath):
        directory.store.abort_leftovers()
        return not is_there(directory)
    for name in names_in(directory):
        if parse_shard_subdirectory(name) is not None:
            with contextlib.suppress(OSError):
                (directory / name).rmdir()
    with contextlib.suppress(OSError):
        directory.rmdir()
    return not is_there(directory)


def remove_old_rejected(run: Run) -> None:
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


def remove_rejected(run: Run, entry: RejectedEntry) -> bool:
    """Remove a checkpoint that was set aside; tell whether its directory went."""
    is_gone = remove_checkpoint(entry.path)
    if is_gone:
        run.forget_rejected(entry)
    return is_gone


def _remove_stored(paths: Iterable[RemotePath]) -> None:
    names: defaultdict[RemotePath, list[str]] = defaultdict(list)
    for path in paths:
        names[path.parent].append(path.name)
    for directory, inside in names.items():
        directory.store.delete(inside)
