"""Says what a store can do, whatever it is made of; touches nothing."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

Names = list[str]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file in a store.

    Attributes
    ----------
    name : str
        Relative to the store, with "/" between its components.
    nbytes : int
        Its size.
    sha256 : str or None
        64 hex digits, where the store keeps what the upload has verified. Listings of
        S3 do not tell it, `Store.stat` does.
    modified_s : float or None
        When it was written, in seconds since the epoch, by the clock of the store.
    """

    name: str
    nbytes: int
    sha256: str | None = None
    modified_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How a store is talked to.

    Attributes
    ----------
    part_nbytes : int
        Size of the parts of a large file; what a crash can cost. S3 takes none below
        5 MiB. Larger where a file would have too many.
    in_flight : int
        Parts of one upload that are sent at once; each lies in memory.
    retry_for_s : float
        How long after the first failure a request is tried again.
    connect_timeout_s, read_timeout_s : float
        How long a connection may take, and how long it may be silent.
    """

    part_nbytes: int = 16 << 20
    in_flight: int = 2
    retry_for_s: float = 60.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0


class Pace(Protocol):
    """Bounds a bandwidth."""

    def take(self, nbytes: int) -> None:
        """Return when so many bytes may be sent."""


class Store(Protocol):
    """Files under relative names; "/" separates, and nothing is outside.

    Notes
    -----
    Whatever fails is a StorageError with `path` (the URL of the file) and `errno`:
    ENOENT (the file, or the bucket, is not there), EACCES (no, wrong or expired
    credentials, or not allowed), ETIMEDOUT (no answer), ECANCELED, ENOSPC, EDQUOT, EIO.
    What may pass by itself is tried again before, with pauses. No call waits for ever.
    All of it may be called from several threads at once.
    """

    @property
    def url(self) -> str:
        """Where the store is; a name follows after a "/"."""

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield the files whose names begin with `prefix`, in all directories.

        Parts of unfinished uploads are not among them.
        """

    def directories(self, prefix: str = "") -> Names:
        """Return the names of the directories right below one.

        Parameters
        ----------
        prefix : str
            The directory, with or without a "/" at its end; empty for the store.

        Returns
        -------
        list of str
            Sorted names relative to the store, without a "/" at the end.
        """

    def stat(self, name: str) -> StoredFile | None:
        """Return what the store says about a file; None where there is none."""

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a file; fewer where it ends, all of the rest by default."""

    def read_into(self, name: str, view: memoryview, offset: int = 0) -> int:
        """Fill `view` from a file and return the bytes read; fewer where it ends."""

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, replacing the one of that name at once.

        Notes
        -----
        Durable when it returns.
        """

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file unless there is one of that name.

        Returns
        -------
        bool
            False if there was one, which stays.

        Notes
        -----
        Durable when it returns. One of several writers wins, where `check_conditions`
        is true; else a look comes first and two may slip through.
        """

    def upload(
        self,
        name: str,
        source: Path,
        *,
        nbytes: int,
        sha256: str,
        pace: Pace | None = None,
        cancelled: Event | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file of this node into the store.

        Parameters
        ----------
        name : str
            Its name in the store. It appears when it is whole, and not before.
        source : Path
            The file.
        nbytes : int
            Its size.
        sha256 : str
            Its digest, 64 hex digits; what was read and sent has it, or nothing is
            there under `name`. The store keeps it for `stat`.
        pace : Pace, optional
            Asked for every byte before it is sent.
        cancelled : Event, optional
            Ends the upload (ECANCELED) soon after it is set.
        progress : callable, optional
            Told, on the calling thread, how many more bytes the store has; those that
            an upload before this one has left there count, and a negative number takes
            back.

        Raises
        ------
        CorruptShardError
            The source has another digest.
        IncompleteCheckpointError
            The source has another size.
        StorageError
            What is in the store already is found by the next upload of the same file,
            from whichever process or node, and not sent again.

        Notes
        -----
        Durable when it returns. A file that is there with this size and digest is not
        sent again: delete a damaged one first.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, also those that are not there."""

    def abort_leftovers(self, prefix: str = "", older_than_s: float = 0.0) -> int:
        """Remove what unfinished uploads have left and return how many there were.

        Parameters
        ----------
        prefix : str
            Of the names that the uploads were to have.
        older_than_s : float
            Spares what may still be going on, by the clock of the store.
        """

    def check_conditions(self) -> bool:
        """Tell whether `put_new` is atomic here; asked of the store once a process."""
