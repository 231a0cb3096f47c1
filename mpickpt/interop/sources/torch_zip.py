"""Reads the directory of a zip as torch writes it, strictly; knows bytes, no files.

Such a zip has its entries stored, not compressed, one after the other, then the
central directory, the records of zip64 and the end record, and nothing after it.
"""

import struct
from collections.abc import Callable
from typing import NoReturn

import msgspec

from mpickpt.errors import CorruptShardError, IncompleteCheckpointError, ManifestError

ReadAt = Callable[[int, int], bytes]

LOCAL_HEADER_NBYTES = 30

_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED = 1
_DESCRIBED_AFTER = 8
_MOST_DIRECTORY_NBYTES = 1 << 28
# torch.save before version 1.6, and with _use_new_zipfile_serialization=False since.
_LEGACY = (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", b"\x80\x02\x8a\x0al\xfc")


class ZipEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry: where its header lies, its length, and the CRC-32 of its bytes."""

    header_offset: int
    nbytes: int
    crc32: int


class ZipDirectory(msgspec.Struct, frozen=True):
    """The entries by name, without the folder that torch puts all of them in."""

    folder: str
    entries: dict[str, ZipEntry]


def read_directory(read_at: ReadAt, nbytes: int, where: str) -> ZipDirectory:
    """Return the directory of a zip.

    Parameters
    ----------
    read_at : callable
        Gives so many bytes from an offset; both lie inside the zip.
    nbytes : int
        Length of the zip.
    where : str
        The file, for errors.

    Raises
    ------
    IncompleteCheckpointError
        If its end is missing.
    CorruptShardError
        If records do not fit together, or entries overlap.
    ManifestError
        If it is no zip, or of a kind that torch does not write.
    """
    _require_zip(read_at, nbytes, where)
    count, size, offset, end = _end_record(read_at, nbytes, where)
    if offset + size != end or size > _MOST_DIRECTORY_NBYTES:
        _corrupt(where, "its central directory does not reach to its end record")
    records = read_at(offset, size)
    entries: dict[str, ZipEntry] = {}
    at = 0
    for _ in range(count):
        name, entry, at = _central_record(records, at, where)
        if name in entries:
            _corrupt(where, f"it has two entries {name!r}")
        entries[name] = entry
    if at != size:
        _corrupt(where, "its central directory is longer than its entries")
    _require_apart(entries, offset, where)
    return _without_folder(entries, where)


def data_offset(header: bytes, name: str, entry: ZipEntry, where: str) -> int:
    """Return where the bytes of an entry begin, from its local header.

    Parameters
    ----------
    header : bytes
        What lies at the entry's `header_offset`, with the name.
    name : str
        Name of the entry, folder included.
    """
    fields = _LOCAL.unpack_from(header)
    signature, _, flags, method, _, _, crc, _, nbytes, name_length, extra = fields
    is_later = flags & _DESCRIBED_AFTER and crc == nbytes == 0
    has_sizes = is_later or (
        crc == entry.crc32 and nbytes in (entry.nbytes, _FULL32, 0)
    )
    named = header[LOCAL_HEADER_NBYTES : LOCAL_HEADER_NBYTES + name_length]
    if (
        signature != b"PK\x03\x04"
        or method != 0
        or named != name.encode()
        or not has_sizes
    ):
        _corrupt(where, f"the header of its entry {name!r} is not the directory's")
    return int(entry.header_offset + LOCAL_HEADER_NBYTES + name_length + extra)


def _require_zip(read_at: ReadAt, nbytes: int, where: str) -> None:
    first = read_at(0, min(nbytes, 16))
    if first.startswith(_LEGACY):
        raise ManifestError(
            f"{where} is in torch's format from before version 1.6, which has no "
            "checksums; load and save it again with a newer torch: "
            "torch.save(torch.load(path, weights_only=True), path)"
        )
    if not first:
        raise IncompleteCheckpointError(f"{where} is empty")
    if not first.startswith(b"PK\x03\x04"):
        raise ManifestError(
            f"{where} is not a file of torch.save: it does not begin as a zip does"
        )


def _end_record(read_at: ReadAt, nbytes: int, where: str) -> tuple[int, int, int, int]:
    """Return count of entries, size and offset of the directory, and where it ends."""
    end = nbytes - _END.size
    record = _END.unpack(read_at(end, _END.size)) if end >= 0 else (b"",)
    if record[0] != b"PK\x05\x06":
        raise IncompleteCheckpointError(
            f"{where} does not end as a zip does: it was truncated, or never written "
            f"to its end; it has {nbytes} bytes"
        )
    _, disk, first_disk, on_disk, count, size, offset, comment = record
    if disk or first_disk or comment or on_disk != count:
        _corrupt(where, "its end record is not one that torch writes")
    start64 = end - _LOCATOR.size - _END64.size
    tail = read_at(start64, _END64.size + _LOCATOR.size) if start64 >= 0 else b""
    if tail[_END64.size :].startswith(b"PK\x06\x07"):
        return *_end64_record(tail, start64, (count, size, offset), where), start64
    if count == _FULL16 or _FULL32 in (size, offset):
        _corrupt(where, "it lacks the records of a large zip")
    return count, size, offset, end


def _end64_record(
    tail: bytes, start: int, short: tuple[int, int, int], where: str
) -> tuple[int, int, int]:
    _, disk, at, disks = _LOCATOR.unpack_from(tail, _END64.size)
    fields = _END64.unpack_from(tail)
    signature, length, _, _, disk64, first_disk, on_disk, count, size, offset = fields
    if (
        signature != b"PK\x06\x06"
        or length != _END64.size - 12
        or at != start
        or disk
        or disks != 1
        or disk64
        or first_disk
        or on_disk != count
    ):
        _corrupt(where, "its zip64 records do not fit together")
    limits = (_FULL16, _FULL32, _FULL32)
    long = (count, size, offset)
    if any(
        s not in (v, limit) for s, v, limit in zip(short, long, limits, strict=True)
    ):
        _corrupt(where, "its end record and its zip64 record differ")
    return long


def _central_record(records: bytes, at: int, where: str) -> tuple[str, ZipEntry, int]:
    if len(records) - at < _CENTRAL.size:
        _corrupt(where, "its central directory is shorter than its entries")
    fields = _CENTRAL.unpack_from(records, at)
    flags, method, crc, packed, nbytes = (fields[i] for i in (3, 4, 7, 8, 9))
    name_length, extra_length, comment_length = fields[10:13]
    name_at = at + _CENTRAL.size
    extra_at = name_at + name_length
    stop = extra_at + extra_length + comment_length
    if fields[0] != b"PK\x01\x02" or stop > len(records):
        _corrupt(where, "a record of its central directory is damaged")
    name = _name(records[name_at:extra_at], where)
    long = _long_fields(records[extra_at : extra_at + extra_length])
    nbytes, packed, offset = (
        long.pop(0) if value == _FULL32 and long else value
        for value in (nbytes, packed, fields[16])
    )
    if method or flags & _ENCRYPTED or packed != nbytes:
        raise ManifestError(
            f"{where}: its entry {name!r} is compressed or encrypted, which torch "
            "never does"
        )
    return name, ZipEntry(offset, nbytes, crc), stop


def _name(encoded: bytes, where: str) -> str:
    try:
        name = encoded.decode("utf-8")
    except UnicodeDecodeError:
        _corrupt(where, f"it has an entry with the name {encoded[:80]!r}")
    parts = name.split("/")
    if "\0" in name or "\\" in name or any(p in ("", ".", "..") for p in parts):
        raise ManifestError(
            f"{where} has an entry {name[:200]!r}, which is not a plain relative path"
        )
    return name


def _long_fields(extra: bytes) -> list[int]:
    """Return the 64-bit fields of the zip64 extra, in order; none without one."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            content = extra[at + 4 : at + 4 + length]
            return [
                int.from_bytes(content[i : i + 8], "little")
                for i in range(0, len(content) - 7, 8)
            ]
        at += 4 + length
    return []


def _require_apart(entries: dict[str, ZipEntry], end: int, where: str) -> None:
    spans = sorted(
        (e.header_offset, e.header_offset + LOCAL_HEADER_NBYTES + e.nbytes, name)
        for name, e in entries.items()
    )
    stops = [start for start, _, _ in spans[1:]] + [end]
    for (_, least_stop, name), next_start in zip(spans, stops, strict=True):
        if least_stop > next_start:
            _corrupt(where, f"its entry {name!r} overlaps with what follows it")


def _without_folder(entries: dict[str, ZipEntry], where: str) -> ZipDirectory:
    folder = next(iter(entries), "").partition("/")[0]
    if f"{folder}/data.pkl" not in entries or f"{folder}/constants.pkl" in entries:
        raise ManifestError(
            f"{where} is a zip, but not one of torch.save: a file data.pkl alone "
            "describes what is in those"
        )
    prefix = folder + "/"
    inside = {}
    for name, entry in entries.items():
        if not name.startswith(prefix):
            _corrupt(where, f"its entry {name!r} is outside of {folder!r}")
        inside[name.removeprefix(prefix)] = entry
    return ZipDirectory(folder, inside)


def _corrupt(where: str, what: str) -> NoReturn:
    raise CorruptShardError(f"{where} is damaged: {what}", path=where)
