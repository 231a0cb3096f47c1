"""Computes the CRC-32 of a whole from those of its parts, read in any order.

zlib has the arithmetic but its Python module does not show it. No I/O.
"""

from bisect import bisect_right
from functools import lru_cache

from mpickpt.format.digest import crc32

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def join_crc32(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two runs of bytes that follow each other.

    Parameters
    ----------
    first, second : int
        The CRC-32 of each.
    second_nbytes : int
        Length of the second run.
    """
    return _times(_power_of_x(8 * second_nbytes), first) ^ second


class CrcOfParts:
    """What was read of a run of bytes, and the CRC-32 of that.

    Each byte counts once, however often it was read.
    """

    __slots__ = ("_crcs", "_starts", "_stops", "nbytes")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._crcs: list[int] = []
        self.nbytes = 0

    def add(self, start: int, content: memoryview) -> None:
        """Count bytes that were read from `start` on."""
        for first, last in self.gaps(start, start + len(content)):
            self._add_new(first, content[first - start : last - start])

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of [start, stop) that were not counted yet."""
        found = []
        index = bisect_right(self._stops, start)
        while start < stop:
            is_last = index == len(self._starts)
            until = stop if is_last else min(stop, self._starts[index])
            if start < until:
                found.append((start, until))
            start = stop if is_last else self._stops[index]
            index += 1
        return found

    def total(self) -> int:
        """Return the CRC-32 of all, once there is no gap."""
        whole = 0
        for start, stop, crc in zip(self._starts, self._stops, self._crcs, strict=True):
            whole = join_crc32(whole, crc, stop - start)
        return whole

    def _add_new(self, start: int, content: memoryview) -> None:
        index = bisect_right(self._stops, start - 1)
        stop = start + len(content)
        self.nbytes += len(content)
        if index < len(self._stops) and self._stops[index] == start:
            self._crcs[index] = crc32(content, self._crcs[index])
            self._stops[index] = stop
            return
        self._starts.insert(index, start)
        self._stops.insert(index, stop)
        self._crcs.insert(index, crc32(content))


def _times(a: int, b: int) -> int:
    """Multiply two polynomials over GF(2), modulo that of CRC-32."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power
