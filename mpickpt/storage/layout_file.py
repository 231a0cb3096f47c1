"""Reads the layout file of a checkpoint: which rank holds which box; verified."""

import hashlib

from mpickpt.errors import ManifestError
from mpickpt.format.digest import BLOCK_NBYTES
from mpickpt.format.layout_document import LayoutEntry, parse_layout_document
from mpickpt.format.records import LayoutRecord
from mpickpt.storage.checks import corrupt_shard
from mpickpt.storage.places import Place, open_to_read
from mpickpt.storage.stream import read_verified

# A writer leaves larger layouts out; a hostile one must not fill the memory.
_MAX_NBYTES = 65 << 20


def read_layout(directory: Place, record: LayoutRecord) -> dict[str, LayoutEntry]:
    """Return the entries of a layout file by key.

    Parameters
    ----------
    directory : Path or RemotePath
        Directory of the checkpoint.
    record : LayoutRecord
        What the manifest says of the file.

    Raises
    ------
    CorruptShardError, IncompleteCheckpointError, ManifestError, StorageError
        If the file is not as it was saved.
    """
    path = directory / record.path
    offset, nbytes, crc = record.payload
    if nbytes > _MAX_NBYTES:
        raise ManifestError(
            f"{path}: a layout of {nbytes} bytes; at most {_MAX_NBYTES} are read"
        )
    document = read_verified(path, offset, nbytes, crc)
    return {e.key: e for e in parse_layout_document(document, str(path))}


def verify_layout(directory: Place, record: LayoutRecord) -> None:
    """Raise unless a layout file is, to the last byte, as it was saved.

    Raises
    ------
    CorruptShardError, IncompleteCheckpointError, ManifestError, StorageError
        If it is not.
    """
    path, sha256 = directory / record.path, hashlib.sha256()
    with open_to_read(path, nbytes=record.nbytes) as file:
        view = memoryview(bytearray(min(BLOCK_NBYTES, record.nbytes)))
        for start in range(0, record.nbytes, BLOCK_NBYTES):
            block = view[: record.nbytes - start]
            file.read_at(block, start)
            sha256.update(block)
    if sha256.hexdigest() != record.sha256:
        raise corrupt_shard(path, "the file", record.sha256, sha256.hexdigest())
    read_layout(directory, record)
