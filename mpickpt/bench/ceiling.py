"""Copies and digests in memory, without I/O: the bound that the processor sets."""

import hashlib
from collections.abc import Iterable

from mpickpt.bench.bench import Array
from mpickpt.format.digest import crc32
from mpickpt.storage.regions import bytes_of

CEILING = "copy + SHA-256 + CRC-32"

# Fits the second-level cache beside its source.
_CHUNK_NBYTES = 256 << 10


def copy_and_digest(arrays: Iterable[Array]) -> None:
    """Copy, SHA-256 and CRC-32 all bytes, chunk by chunk, in one thread."""
    sha256, crc = hashlib.sha256(), 0
    chunk = memoryview(bytearray(_CHUNK_NBYTES))
    for array in arrays:
        view = bytes_of(array)
        for start in range(0, len(view), _CHUNK_NBYTES):
            piece = view[start : start + _CHUNK_NBYTES]
            copied = chunk[: len(piece)]
            copied[:] = piece
            sha256.update(copied)
            crc = crc32(copied, crc)
