"""Reads one entry of a file of torch.save in any order, and verifies it; no MPI."""

import threading

from mpickpt.errors import CorruptShardError
from mpickpt.format.digest import crc32_hex
from mpickpt.interop.sources.crc_of_parts import CrcOfParts
from mpickpt.interop.sources.file import SourceFile
from mpickpt.interop.sources.torch_zip import LOCAL_HEADER_NBYTES, ZipEntry, data_offset

_GAP_NBYTES = 1 << 20


class StoredEntry:
    """The bytes of one entry, of which ranges are announced and then read.

    Parameters
    ----------
    source : SourceFile
        The file; held open until all that was announced was read.
    name : str
        Name of the entry, folder included.
    entry : ZipEntry
        Where it lies.
    is_checked : bool
        Whether the file has checksums.
    """

    def __init__(
        self, source: SourceFile, name: str, entry: ZipEntry, *, is_checked: bool
    ) -> None:
        self._source = source
        self._name = name
        self._entry = entry
        self._is_checked = is_checked
        self._wanted: list[tuple[int, int]] = []
        self._wanted_nbytes = 0
        self._read = CrcOfParts()
        self._lock = threading.Lock()
        self._data_offset: int | None = None
        self._is_held = False
        self.is_done = False

    def expect(self, start: int, stop: int) -> None:
        """Announce that the bytes [start, stop) are going to be read."""
        if start == stop:
            return
        if self._wanted and self._wanted[-1][1] == start:
            start = self._wanted.pop()[0]
        self._wanted.append((start, stop))
        self._wanted_nbytes = 0
        if not self._is_held:
            self._source.hold()
            self._is_held = True

    def read(self, start: int, stop: int) -> bytearray:
        """Return the bytes [start, stop).

        Raises
        ------
        CorruptShardError
            At the last of the announced bytes: the entry differs from its CRC-32.
        IncompleteCheckpointError
            If the file ends before.
        """
        content = bytearray(stop - start)
        with self._lock:
            self._source.read_into(memoryview(content), self._begin() + start)
            if not self.is_done:
                self._read.add(start, memoryview(content))
                if not self._wanted_nbytes:
                    self._wanted = _union(self._wanted)
                    self._wanted_nbytes = sum(b - a for a, b in self._wanted)
                if self._read.nbytes >= self._wanted_nbytes:
                    self._finish()
        return content

    def read_all(self) -> bytes:
        """Return the whole entry, verified."""
        self.expect(0, self._entry.nbytes)
        return bytes(self.read(0, self._entry.nbytes))

    def _begin(self) -> int:
        if self._data_offset is None:
            where = self._source.where
            length = LOCAL_HEADER_NBYTES + len(self._name.encode())
            header = self._source.read(self._entry.header_offset, length)
            self._data_offset = data_offset(header, self._name, self._entry, where)
        return self._data_offset

    def _finish(self) -> None:
        if self._is_checked:
            for start, stop in self._read.gaps(0, self._entry.nbytes):
                self._read_gap(start, stop)
            self._require(self._read.total())
        self.is_done = True
        if self._is_held:
            self._source.release()
            self._is_held = False

    def _read_gap(self, start: int, stop: int) -> None:
        for first in range(start, stop, _GAP_NBYTES):
            piece = memoryview(bytearray(min(_GAP_NBYTES, stop - first)))
            self._source.read_into(piece, self._begin() + first)
            self._read.add(first, piece)

    def _require(self, found: int) -> None:
        if found != self._entry.crc32:
            expected, actual = crc32_hex(self._entry.crc32), crc32_hex(found)
            raise CorruptShardError(
                f"{self._source.where}: its entry {self._name!r} has the CRC-32 "
                f"{actual}; {expected} was written with it. The file is damaged; take "
                "another copy of it",
                path=str(self._source.path),
                expected=expected,
                actual=actual,
            )


def _union(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
