"""Reads what a file of torch.save says about itself, verified; no tensors, no MPI."""

import msgspec

from mpickpt.errors import CorruptShardError, ManifestError
from mpickpt.format.digest import crc32
from mpickpt.interop.sources.file import SourceFile
from mpickpt.interop.sources.restricted_unpickler import MOST_NBYTES
from mpickpt.interop.sources.stored_entry import StoredEntry
from mpickpt.interop.sources.torch_zip import ZipDirectory, ZipEntry, read_directory

PICKLE = "data.pkl"
STORAGES = "data/"
# Counts of steps and the like are of one element.
_SMALL_NBYTES = 16
_NAMED_NBYTES = 1 << 16


class TorchHead(msgspec.Struct, frozen=True):
    """What a file says about itself, verified; it can be sent to other ranks.

    Attributes
    ----------
    nbytes : int
        Length of the file or slice.
    directory : ZipDirectory
        Its storages.
    pickled : bytes
        What there is, as a pickle.
    small : dict of str to bytes
        Content of the storages of a few bytes.
    is_checked : bool
        Whether the file has checksums; false after
        ``torch.serialization.set_crc32_options(False)``, which writes 0 for each.
    """

    nbytes: int
    directory: ZipDirectory
    pickled: bytes
    small: dict[str, bytes]
    is_checked: bool


def read_head(source: SourceFile) -> TorchHead:
    """Return what a file says about itself, verified by its checksums.

    Raises
    ------
    IncompleteCheckpointError, CorruptShardError, ManifestError
        As `open_torch_file`.
    """
    where = source.where
    directory = read_directory(source.read, source.nbytes, where)
    entries = directory.entries
    # Of a file without checksums the writer left all of these fields 0.
    is_checked = any(entry.crc32 for entry in entries.values())
    named = {
        name: _content(source, directory, name, is_checked)
        for name, entry in entries.items()
        if _is_read_at_once(name, entry)
    }
    if entries[PICKLE].nbytes > MOST_NBYTES:
        raise ManifestError(
            f"{where} has a pickle of {entries[PICKLE].nbytes} bytes; not more than "
            f"{MOST_NBYTES} are read"
        )
    order = named.get("byteorder", b"little")
    if order != b"little":
        raise ManifestError(
            f"{where} was written on a machine with the byte order {order[:16]!r}; "
            "only files in little-endian order are read"
        )
    pickled = _content(source, directory, PICKLE, is_checked)
    if not is_checked and crc32(pickled) == 0:
        raise CorruptShardError(f"{where} is damaged: no checksums", path=where)
    storages = {n: e for n, e in entries.items() if n.startswith(STORAGES)}
    return TorchHead(
        nbytes=source.nbytes,
        directory=ZipDirectory(directory.folder, storages),
        pickled=pickled,
        small={
            name.removeprefix(STORAGES): content
            for name, content in named.items()
            if name.startswith(STORAGES)
        },
        is_checked=is_checked,
    )


def _is_read_at_once(name: str, entry: ZipEntry) -> bool:
    if name.startswith(STORAGES):
        return entry.nbytes <= _SMALL_NBYTES
    return name != PICKLE and entry.nbytes <= _NAMED_NBYTES


def _content(
    source: SourceFile, directory: ZipDirectory, name: str, is_checked: bool
) -> bytes:
    full_name = f"{directory.folder}/{name}"
    entry = StoredEntry(
        source, full_name, directory.entries[name], is_checked=is_checked
    )
    return entry.read_all()
