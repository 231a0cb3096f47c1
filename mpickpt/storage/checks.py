"""Compares bytes that are read with the digests that were saved; does no I/O."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mpickpt.errors import CorruptShardError
from mpickpt.format.digest import (
    TABLE_ITEM_NBYTES,
    block_at,
    crc32,
    crc32_hex,
    shard_blocks,
)
from mpickpt.storage.remote_path import RemotePath

Span = tuple[int, int]


class Verifier(Protocol):
    """Follows the bytes of one file as they are read, in file order."""

    def update(self, offset: int, view: memoryview) -> None:
        """Take the bytes at `offset`."""

    def finish(self) -> None:
        """Conclude, when all was read."""


class Check(Protocol):
    """How the bytes of a file are verified."""

    def begin(
        self, path: Path | RemotePath, nbytes: int, spans: Sequence[Span]
    ) -> Verifier:
        """Return the verifier of one reading; ValueError for spans it cannot verify."""


@dataclass(frozen=True, slots=True)
class WholeFileSha256:
    """Verify the whole file, which must be read from end to end.

    Parameters
    ----------
    expected : str
        SHA-256 as 64 lower-case hex digits.
    """

    expected: str

    def begin(
        self, path: Path | RemotePath, nbytes: int, spans: Sequence[Span]
    ) -> Verifier:
        """Return the verifier of one reading."""
        if list(spans) != [(0, nbytes)]:
            raise ValueError("SHA-256 verifies whole files only")
        return _Sha256Verifier(path, self.expected)


@dataclass(frozen=True, slots=True)
class BlockCrc32:
    """Verify each block that is read by its CRC-32.

    Parameters
    ----------
    table_offset : int
        Where the table lies in the file.
    table : bytes
        The table, itself verified.
    """

    table_offset: int
    table: bytes

    def begin(
        self, path: Path | RemotePath, nbytes: int, spans: Sequence[Span]
    ) -> Verifier:
        """Return the verifier of one reading."""
        return _BlockVerifier(path, self, nbytes, spans)


@dataclass(frozen=True, slots=True)
class NoCheck:
    """Verify nothing."""

    def begin(
        self, path: Path | RemotePath, nbytes: int, spans: Sequence[Span]
    ) -> Verifier:
        """Return the verifier of one reading."""
        return _NoVerifier()


class _Sha256Verifier:
    def __init__(self, path: Path | RemotePath, expected: str) -> None:
        self._path = path
        self._expected = expected
        self._sha256 = hashlib.sha256()

    def update(self, offset: int, view: memoryview) -> None:
        self._sha256.update(view)

    def finish(self) -> None:
        actual = self._sha256.hexdigest()
        if actual != self._expected:
            raise corrupt_shard(self._path, "the file", self._expected, actual)


class _BlockVerifier:
    def __init__(
        self,
        path: Path | RemotePath,
        check: BlockCrc32,
        nbytes: int,
        spans: Sequence[Span],
    ) -> None:
        self._path = path
        self._table = check.table
        self._place = (check.table_offset, len(check.table), nbytes)
        self._blocks = shard_blocks(*self._place)
        count = len(check.table) // TABLE_ITEM_NBYTES
        self._expected = struct.unpack(f"<{count}I", check.table)
        if count != len(self._blocks):
            raise corrupt_shard(
                path, "the table", f"{len(self._blocks)} blocks", str(count)
            )
        self._refuse_parts_of_blocks(spans)
        self._crc = 0

    def update(self, offset: int, view: memoryview) -> None:
        while view:
            number = block_at(offset, *self._place)
            if number is None:
                taken = self._in_table(offset, view)
            else:
                taken = self._in_block(number, offset, view)
            offset += taken
            view = view[taken:]

    def finish(self) -> None:
        """Do nothing: each block was compared when it was complete."""

    def _in_block(self, number: int, offset: int, view: memoryview) -> int:
        start, stop = self._blocks[number]
        chunk = view[: stop - offset]
        self._crc = crc32(chunk, self._crc if offset > start else 0)
        if offset + len(chunk) == stop and self._crc != self._expected[number]:
            expected, actual = map(crc32_hex, (self._expected[number], self._crc))
            raise corrupt_shard(
                self._path, f"bytes {start} to {stop}", expected, actual
            )
        return len(chunk)

    def _in_table(self, offset: int, view: memoryview) -> int:
        rest = self._table[offset - self._place[0] :]
        chunk = view[: len(rest)]
        if chunk != rest[: len(chunk)]:
            raise corrupt_shard(self._path, "the table", rest.hex(), chunk.hex())
        return len(chunk)

    def _refuse_parts_of_blocks(self, spans: Sequence[Span]) -> None:
        table = (self._place[0], self._place[0] + self._place[1])
        starts, stops = zip(*self._blocks, table, strict=True)
        if not {start for start, _ in spans} <= {*starts}:
            raise ValueError("a span does not start where a block does")
        if not {stop for _, stop in spans} <= {*stops}:
            raise ValueError("a span does not end where a block does")


class _NoVerifier:
    def update(self, offset: int, view: memoryview) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


def corrupt_shard(
    path: Path | RemotePath, what: str, expected: str, actual: str
) -> CorruptShardError:
    """Return the error that tells which part of a file is damaged."""
    return CorruptShardError(
        f"{path} is damaged: {what} should have digest {expected} and has {actual}",
        path=str(path),
        expected=expected,
        actual=actual,
    )
