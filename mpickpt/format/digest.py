"""Computes the CRC-32 of blocks of a stream; touches nothing.

A shard's *table* holds one CRC-32 per block of 16 MiB, so that a reader of a part
of the file verifies that part alone. The table cannot cover itself: the blocks are
those of [0, table) followed by those of [end of the table, end of file).
"""

import struct
import zlib

try:
    from zlib_ng import zlib_ng
except ImportError:
    _crc32 = zlib.crc32
else:
    # The same values as zlib's, at 7 times its speed.
    _crc32 = zlib_ng.crc32

BLOCK_NBYTES = 16 << 20
TABLE_ITEM_NBYTES = 4

Bytes = bytes | bytearray | memoryview


def crc32(view: Bytes, start: int = 0) -> int:
    """Return the CRC-32 of `view`, continued from the value `start`."""
    return _crc32(view, start)


def crc32_hex(value: int) -> str:
    """Return a CRC-32 as the 8 lower-case hex digits that records hold."""
    return f"{value:08x}"


def n_blocks(nbytes: int) -> int:
    """Return how many blocks a range of `nbytes` has; the last may be short."""
    return -(-nbytes // BLOCK_NBYTES)


def shard_blocks(
    table_offset: int, table_nbytes: int, nbytes: int
) -> list[tuple[int, int]]:
    """Return the (start, stop) of every block, in the order of the table.

    Parameters
    ----------
    table_offset, table_nbytes : int
        Where the table lies in the shard, in bytes.
    nbytes : int
        Size of the shard.
    """
    table_end = table_offset + table_nbytes
    return _blocks(0, table_offset) + _blocks(table_end, nbytes)


def block_at(
    offset: int, table_offset: int, table_nbytes: int, nbytes: int
) -> int | None:
    """Return the number of the block that covers the byte at `offset`.

    None where no block does: in the table itself and outside the file.
    """
    table_end = table_offset + table_nbytes
    if 0 <= offset < table_offset:
        return offset // BLOCK_NBYTES
    if table_end <= offset < nbytes:
        return n_blocks(table_offset) + (offset - table_end) // BLOCK_NBYTES
    return None


class BlockCrc:
    """Compute the CRC-32 of each block of one range that is fed in order."""

    __slots__ = ("_crc", "_done", "_filled")

    def __init__(self) -> None:
        self._done: list[int] = []
        self._crc = 0
        self._filled = 0

    def update(self, view: Bytes) -> None:
        """Feed the next bytes of the range, as many as there are."""
        rest = memoryview(view)
        if not rest.nbytes:
            return
        rest = rest.cast("B")
        while rest.nbytes:
            chunk = rest[: BLOCK_NBYTES - self._filled]
            self._crc = crc32(chunk, self._crc)
            self._filled += chunk.nbytes
            if self._filled == BLOCK_NBYTES:
                self._done.append(self._crc)
                self._crc = self._filled = 0
            rest = rest[chunk.nbytes :]

    def table(self) -> bytes:
        """Return the CRC-32 of every block so far as little-endian uint32."""
        values = [*self._done, self._crc] if self._filled else self._done
        return struct.pack(f"<{len(values)}I", *values)


def _blocks(start: int, stop: int) -> list[tuple[int, int]]:
    return [
        (first, min(first + BLOCK_NBYTES, stop))
        for first in range(start, stop, BLOCK_NBYTES)
    ]
