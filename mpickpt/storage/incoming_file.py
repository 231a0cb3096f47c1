"""Writes a file that arrives piece by piece from another node; files, no MPI."""

import contextlib
import hashlib
from pathlib import Path
from typing import Protocol

from mpickpt.errors import CheckpointError
from mpickpt.storage.checks import corrupt_shard
from mpickpt.storage.commit import close_file, make_directory, publish, sync_file
from mpickpt.storage.held_temporary import held_temporary
from mpickpt.storage.shard_file import ShardFile


class ExpectedFile(Protocol):
    """What is known of a file before it comes; the manifest's records are such."""

    @property
    def path(self) -> str:
        """Where it goes, relative to the checkpoint's directory."""

    @property
    def nbytes(self) -> int:
        """Size."""

    @property
    def sha256(self) -> str:
        """Digest of the whole file, hex."""


class IncomingFile:
    """A file that is written under another name until all of it was verified.

    Parameters
    ----------
    directory : Path
        Of the checkpoint, on the disk of this node.
    record : ExpectedFile
        What the manifest says of the file, or whoever sends it.

    Raises
    ------
    StorageError
        It cannot be created.

    Notes
    -----
    What has the final name, damaged perhaps, is replaced by a whole file or not at all.
    """

    def __init__(self, directory: Path, record: ExpectedFile) -> None:
        self.path = directory / record.path
        self._record = record
        self._sha256 = hashlib.sha256()
        self._nbytes = 0
        self._stack = contextlib.ExitStack()
        if self.path.parent != directory:
            make_directory(self.path.parent)
        held = self._stack.enter_context(held_temporary(self.path))
        self._file = ShardFile(
            held.descriptor, held.path, nbytes=record.nbytes, direct=False
        )
        self._is_open = True

    def take(self, offset: int, content: memoryview) -> None:
        """Write the next bytes.

        Raises
        ------
        StorageError
            The file system refuses.
        """
        if offset != self._nbytes or offset + len(content) > self._record.nbytes:
            raise CheckpointError(
                f"{self.path}: got bytes {offset} to {offset + len(content)} after "
                f"{self._nbytes} of {self._record.nbytes}"
            )
        self._file.write_at(content, offset)
        self._sha256.update(content)
        self._nbytes += len(content)

    def finish(self) -> None:
        """Give the file its name, durably, if it is the one that was saved.

        Raises
        ------
        CorruptShardError
            What came is not what was saved.
        StorageError
            The file system refuses.
        """
        actual = self._sha256.hexdigest()
        if actual != self._record.sha256:
            self.abandon()
            raise corrupt_shard(
                self.path, "what came for it", self._record.sha256, actual
            )
        try:
            sync_file(self._file.descriptor, self._file.path)
            self._close()
            publish(self._file.path, self.path)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Remove what was written, unless it has its name; may be called twice."""
        with contextlib.suppress(CheckpointError):  # nothing of it is wanted any more
            self._close()
        self._stack.close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            close_file(self._file.descriptor, self._file.path)
