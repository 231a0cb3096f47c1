"""Reads ranges of a foreign file that is opened only while it is needed; no MPI."""

import os
from collections import OrderedDict
from pathlib import Path

from mpickpt.errors import IncompleteCheckpointError
from mpickpt.interop.sources.containment import open_contained
from mpickpt.storage.commit import storage_errors


class OpenFiles:
    """Keeps files open between reads, but not more than a process may have.

    Parameters
    ----------
    most : int
        How many; the one that was read longest ago is closed first.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def descriptor(self, root: Path, relative: str) -> int:
        """Return a descriptor of a file below the one root, for the next read alone."""
        descriptor = self._descriptors.get(relative)
        if descriptor is not None:
            self._descriptors.move_to_end(relative)
            return descriptor
        while len(self._descriptors) >= self._most:
            os.close(self._descriptors.popitem(last=False)[1])
        self._descriptors[relative] = open_contained(root, relative)
        return self._descriptors[relative]

    def close(self, relative: str) -> None:
        """Close a file, if it is open."""
        descriptor = self._descriptors.pop(relative, None)
        if descriptor is not None:
            os.close(descriptor)


class SourceFile:
    """A regular file inside the directory of a foreign checkpoint, or a slice of it.

    Parameters
    ----------
    root : Path
        The checkpoint's directory.
    relative : str
        The file inside it; no component may be a symlink.
    start, nbytes : int, optional
        The slice; default the whole file. Offsets below are relative to it.
    label : str, optional
        What the checkpoint calls the slice, for errors.
    opened : OpenFiles, optional
        Keeps it open together with others.

    Attributes
    ----------
    where : str
        The file, and the slice of it, for errors.
    """

    def __init__(
        self,
        root: Path,
        relative: str,
        start: int = 0,
        nbytes: int | None = None,
        *,
        label: str | None = None,
        opened: OpenFiles | None = None,
    ) -> None:
        self.root = root
        self.relative = relative
        self.path = root / relative
        self.where = str(self.path) if label is None else f"{self.path} ({label})"
        self.start = start
        self._nbytes = nbytes
        self._opened = opened or OpenFiles()
        self._users = 0

    @property
    def nbytes(self) -> int:
        """Length of the slice.

        Raises
        ------
        IncompleteCheckpointError
            If the file is missing, or shorter than the slice.
        """
        if self._nbytes is None:
            self._nbytes = self._file_nbytes() - self.start
        return self._nbytes

    def hold(self) -> None:
        """Keep the file open from its next read on, until `release` is called."""
        self._users += 1

    def release(self) -> None:
        """Take back a `hold`; the last one closes the file."""
        self._users -= 1
        if self._users == 0:
            self.close()

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        self._opened.close(self.relative)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return so many bytes from an offset, which the file must have."""
        content = bytearray(nbytes)
        self.read_into(memoryview(content), offset)
        return bytes(content)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from an offset.

        Raises
        ------
        IncompleteCheckpointError
            If the file ends before, or is missing.
        """
        descriptor, done = self._open(), 0
        with storage_errors("read", self.path):
            while done < len(view):
                at = self.start + offset + done
                count = os.preadv(descriptor, [view[done:]], at)
                if not count:
                    raise IncompleteCheckpointError(
                        f"{self.path} ends at byte {at}; expected were "
                        f"{len(view) - done} more: it was truncated",
                        path=str(self.path),
                    )
                done += count

    def _open(self) -> int:
        return self._opened.descriptor(self.root, self.relative)

    def _file_nbytes(self) -> int:
        descriptor = self._open()
        with storage_errors("look at", self.path):
            return os.fstat(descriptor).st_size
