"""Reads one object of a store by ranges, as a file is read; no MPI, no files.

What a store keeps under a name of a checkpoint never changes, so there is nothing to
look at twice; its client has tried again by itself before an error comes here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from mpickpt.errors import IncompleteCheckpointError, StorageError
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.second_look import is_gone
from mpickpt.storage.shard_file import wrong_size
from mpickpt.storage.stores.store import StoredFile

# A request costs tens of milliseconds before its first byte; of so many bytes it lasts
# longer than that, and still a cut connection loses little.
RANGE_NBYTES = 8 << 20
_MOST_NBYTES = 16 << 20


class RemoteFile:
    """An object at whose offsets threads may read at the same time.

    Parameters
    ----------
    path : RemotePath
        Where it is.
    nbytes : int
        Its size.
    """

    def __init__(self, path: RemotePath, *, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._store = path.parent.store

    def read_at(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`, or as much of it as the object has.

        Raises
        ------
        IncompleteCheckpointError
            If it has gone since it was opened, or is shorter.
        StorageError
            If the store refuses.
        """
        needed = min(len(view), self.nbytes - offset)
        for start in range(0, needed, _MOST_NBYTES):
            part = view[start : min(start + _MOST_NBYTES, needed)]
            self._read_range(part, offset + start)

    def _read_range(self, view: memoryview, offset: int) -> None:
        done = 0
        with _gone_is_missing(self.path):
            while done < len(view):
                rest, start = view[done:], offset + done
                count = self._store.read_into(self.path.name, rest, start)
                if not count:
                    self._refuse_end(offset + done)
                done += count

    def _refuse_end(self, offset: int) -> NoReturn:
        """Raise because the object ends before its size."""
        found = stored_file(self.path)
        if found is None:
            raise _missing(self.path)
        actual = min(found.nbytes, offset)
        raise wrong_size(self.path, f"{self.nbytes}", self.nbytes, actual)


@contextmanager
def open_remote_file(
    path: RemotePath, *, nbytes: int | None = None, is_known: bool = False
) -> Iterator[RemoteFile]:
    """Open an object to be read, which must be of this size if given.

    Parameters
    ----------
    path : RemotePath
        Where it is.
    nbytes : int, optional
        Size that it must have.
    is_known : bool
        It was there a moment ago and had that size: the store is not asked again.

    Raises
    ------
    IncompleteCheckpointError
        If it is missing or has another size.
    StorageError
        If the store refuses.
    """
    if nbytes is None or not is_known:
        found = stored_file(path)
        if found is None:
            raise _missing(path)
        if nbytes not in (None, found.nbytes):
            raise wrong_size(path, f"{nbytes}", nbytes, found.nbytes)
        nbytes = found.nbytes
    yield RemoteFile(path, nbytes=nbytes)


def read_remote_file(path: RemotePath, most_nbytes: int) -> bytes:
    """Return the content of a small object, or so much of it, by one request.

    Raises
    ------
    IncompleteCheckpointError
        If it is missing.
    StorageError
        If the store refuses.
    """
    with _gone_is_missing(path):
        return path.parent.store.read(path.name, 0, most_nbytes)


def stored_file(path: RemotePath) -> StoredFile | None:
    """Return what a store says about an object; None where there is none."""
    # The root of a store has no name, and is no object.
    return path.parent.store.stat(path.name) if path.name else None


@contextmanager
def _gone_is_missing(path: RemotePath) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        if not is_gone(error):
            raise
        raise _missing(path) from error


def _missing(path: RemotePath) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(f"{path} is missing", path=str(path))
