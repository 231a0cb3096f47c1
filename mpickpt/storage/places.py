"""Reads from a directory of files or from a store, whichever a place is; no MPI.

The readers above ask here and need not know which it is. A file costs what it costs
where there are files alone: one question about a type, and no call to the system.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from mpickpt.errors import IncompleteCheckpointError, StorageError
from mpickpt.planning.blocks import DEFAULT_BLOCK_NBYTES
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.filesystem import file_system_of, wants_direct
from mpickpt.storage.filesystem import is_directory as is_file_directory
from mpickpt.storage.remote_file import (
    RANGE_NBYTES,
    open_remote_file,
    read_remote_file,
    stored_file,
)
from mpickpt.storage.remote_path import RemotePath, parse_place
from mpickpt.storage.second_look import SecondLook
from mpickpt.storage.shard_file import ShardFile, open_shard_file
from mpickpt.storage.small_file import is_there as is_file_there
from mpickpt.storage.small_file import names_in

Place = Path | RemotePath
PlaceLike = str | os.PathLike[str] | RemotePath

S = TypeVar("S")
T = TypeVar("T")

# Requests of a store that are under way at one time: each is little but a wait.
MOST_REQUESTS = 16
_PIECE_NBYTES = 1 << 20


class OpenFile(Protocol):
    """A file of a directory or a store that is open to be read, by threads too."""

    @property
    def path(self) -> Place:
        """Where it is, for errors."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def read_at(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`, or as much of it as the file has."""


def open_to_read(
    path: Place,
    *,
    nbytes: int | None = None,
    direct: bool = False,
    is_new: bool = False,
    is_known: bool = False,
) -> AbstractContextManager[OpenFile]:
    """Open a file to be read, which must be a regular one, of this size if given.

    Parameters
    ----------
    path : Path or RemotePath
        The file.
    nbytes : int, optional
        Size that it must have.
    direct : bool
        Whether to go around the page cache, where there is one.
    is_new : bool
        Another node has just made it, so it may come late.
    is_known : bool
        It was there a moment ago and had that size, so a store is not asked again.

    Raises
    ------
    IncompleteCheckpointError
        If it is missing or has another size.
    StorageError
        If it is a symlink, a FIFO or a device, or cannot be opened.
    """
    if isinstance(path, RemotePath):
        return open_remote_file(path, nbytes=nbytes, is_known=is_known)
    return open_shard_file(path, nbytes=nbytes, direct=direct, is_new=is_new)


def read_small_file(path: Place, most_nbytes: int) -> bytes:
    """Return the content of a file, or the first so many bytes of it.

    Raises
    ------
    IncompleteCheckpointError
        If it is missing.
    StorageError
        If it is no regular file, or cannot be read.
    """
    if isinstance(path, RemotePath):
        return read_remote_file(path, most_nbytes)
    look = SecondLook(path)
    while True:
        try:
            with open_shard_file(path, direct=False) as file:
                return _content(file, most_nbytes)
        except StorageError as error:
            # A server forgot its handle; the file may have been replaced.
            if not look.helps(error):
                raise


def _content(file: ShardFile, most_nbytes: int) -> bytes:
    # Up to its end: this node may remember the size of a file that was replaced.
    content = bytearray()
    with storage_errors("read", file.path):
        while len(content) < most_nbytes:
            piece = bytearray(min(most_nbytes - len(content), _PIECE_NBYTES))
            count = os.preadv(file.descriptor, [piece], len(content))
            if not count:
                break
            content += piece[:count]
    return bytes(content)


def require_real_directory(path: Place) -> None:
    """Raise unless a directory is there and no symlink, which could lead to anything.

    In a store a directory is no more than a part of names.
    """
    if isinstance(path, RemotePath):
        return
    with storage_errors("open", path):
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{path} is missing", path=str(path)
            ) from error
        if not stat.S_ISDIR(mode):
            number, text = errno.ENOTDIR, "a shard's directory must be a real one"
            raise NotADirectoryError(number, text)


def reads_direct(path: Place, direct_io: str) -> bool:
    """Tell whether to read a file around the page cache: "on", "off", or "auto"."""
    if isinstance(path, RemotePath):
        return False
    return wants_direct(file_system_of(path.parent), direct_io)


def read_nbytes_at_once(path: Place) -> int:
    """Return how much of a large file to ask for at once."""
    return RANGE_NBYTES if isinstance(path, RemotePath) else DEFAULT_BLOCK_NBYTES


def local_path(place: PlaceLike, why: str) -> Path:
    """Return the path of what can only be in a directory.

    Parameters
    ----------
    place : path-like or URL
        What the user said.
    why : str
        Why a store will not do, and what will, for the error.

    Raises
    ------
    StorageError
        If it is the URL of a store.
    """
    path = parse_place(place)
    if isinstance(path, RemotePath):
        raise StorageError(
            f"{path} is in a store: {why}",
            errno=errno.EOPNOTSUPP,
            path=str(path),
        )
    return path


def absolute(place: PlaceLike) -> Place:
    """Return a place that means the same in every working directory."""
    parsed = parse_place(place)
    return parsed if isinstance(parsed, RemotePath) else Path(os.path.abspath(parsed))


def is_there(path: Place) -> bool:
    """Tell whether anything has this name, or in a store a name that begins with it."""
    if not isinstance(path, RemotePath):
        return is_file_there(path)
    return stored_file(path) is not None or is_directory(path)


def is_directory(path: Place) -> bool:
    """Tell whether a path leads to a directory, or to names in a store."""
    if isinstance(path, RemotePath):
        return next(iter(path.store.list()), None) is not None
    return is_file_directory(path)


def with_file(run_dir: Place, directories: Sequence[Place], name: str) -> list[bool]:
    """Tell of each directory in a run whether a file of this name is in it."""

    def has_it(directory: Place) -> bool:
        path = directory / name
        if isinstance(path, RemotePath):
            return stored_file(path) is not None
        return is_file_there(path)

    return each(has_it, directories, within=run_dir)


def directories_in(place: Place, is_wanted: Callable[[str], bool]) -> list[Place]:
    """Return those directories in a place whose names are wanted."""
    if isinstance(place, RemotePath):
        names = place.store.directories()
        return [place / name for name in names if is_wanted(name)]
    paths = [place / name for name in names_in(place) if is_wanted(name)]
    return [path for path in paths if is_file_directory(path)]


def each(function: Callable[[S], T], items: Iterable[S], *, within: Place) -> list[T]:
    """Return what a function gives for each item, of a store for many at a time.

    Parameters
    ----------
    function : callable
        Looks at what an item stands for.
    items : iterable
        Stand for something in `within`.
    within : Path or RemotePath
        What is looked at.
    """
    listed = list(items)
    if len(listed) < 2 or not isinstance(within, RemotePath):
        return list(map(function, listed))
    from concurrent.futures import ThreadPoolExecutor  # takes some milliseconds

    threads = ThreadPoolExecutor(min(MOST_REQUESTS, len(listed)))
    try:
        return list(threads.map(function, listed))
    finally:
        threads.shutdown(cancel_futures=True)
