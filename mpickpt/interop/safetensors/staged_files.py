"""Writes the files of a directory under other names, and shows them when all are whole.

For files that readers find by name and that belong together, as those of a model do.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from mpickpt.format.naming import TMP_SUFFIX
from mpickpt.storage.commit import (
    discard,
    rename,
    sync_directory,
    sync_file,
    unlink_durably,
    write_new_file,
)
from mpickpt.storage.shard_file import ShardFile, new_shard_file


class StagedFiles:
    """New files of one directory; a context manager that leaves none half written.

    Parameters
    ----------
    directory : Path
        Where they are; it exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in self._made:
            discard(self._tmp(name))

    @contextlib.contextmanager
    def open(self, name: str, nbytes: int) -> Iterator[ShardFile]:
        """Give an open file to be written; its bytes are durable after the body."""
        tmp = self._tmp(name)
        with new_shard_file(tmp, nbytes=nbytes, direct=False) as file:
            self._made.append(name)
            yield file
            sync_file(file.descriptor, tmp)

    def add(self, name: str, content: bytes) -> None:
        """Write a small file."""
        write_new_file(self._tmp(name), content)
        self._made.append(name)

    def publish(self, *, last: str, stale: Sequence[str]) -> None:
        """Give the files their names, durably.

        Parameters
        ----------
        last : str
            Name of the file by which readers find the others. What stands there goes
            before the first, and what is new there comes after the last.
        stale : sequence of str
            Names of files that are to be there no longer.
        """
        unlink_durably(self._directory / last)
        for name in sorted(set(self._made) - {last}):
            rename(self._tmp(name), self._directory / name)
        sync_directory(self._directory)
        if last in self._made:
            rename(self._tmp(last), self._directory / last)
            sync_directory(self._directory)
        self._made = []
        for name in stale:
            unlink_durably(self._directory / name)

    def _tmp(self, name: str) -> Path:
        return self._directory / f"{name}.{os.getpid()}{TMP_SUFFIX}"
