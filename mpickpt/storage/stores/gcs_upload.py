"""Uploads one file to Google Cloud Storage in parts that a later upload finds again.

Its resumable sessions have an address that nobody can ask for, and that lets whoever
has it write: it would have to be kept, in a place that all nodes reach. So a large file
is sent as objects of their own beside its name, which one request joins (`compose`).
What a crash leaves behind is found by listing; a part counts if its size and its two
digests are those of the bytes at hand. In the end the CRC-32C of the joined object must
be that of the bytes whose SHA-256 is the manifest's.
"""

import base64
import contextlib
import errno
import hashlib
from collections.abc import Sequence
from typing import Any, cast

from mpickpt.errors import StorageError
from mpickpt.storage.stores.gcs_blobs import (
    MOST_JOINED,
    delete_keys,
    join_blobs,
    put_bytes,
)
from mpickpt.storage.stores.gcs_bucket import Blob, GcsBucket
from mpickpt.storage.stores.names import parts_prefix
from mpickpt.storage.stores.parts import (
    Part,
    PartContent,
    Sending,
    read_parts,
    send_parts,
)


def upload_whole(
    bucket: GcsBucket, key: str, sending: Sending, parts: Sequence[Part]
) -> None:
    """Upload a file of one part as one object."""
    (content,) = read_parts(sending, parts)
    _put_part(bucket, key, sending, content)
    sending.tell(sending.nbytes)


def upload_in_parts(
    bucket: GcsBucket,
    key: str,
    sending: Sending,
    parts: Sequence[Part],
    in_flight: int,
) -> None:
    """Upload a file of several parts, from where an upload before this one stopped.

    Raises
    ------
    CorruptShardError, IncompleteCheckpointError
        The source is not what the manifest says.
    StorageError
        The store refuses; what it has is found by the next upload.
    """
    prefix = parts_prefix(key, sending.sha256, parts[0].nbytes)
    stored = _blobs_below(bucket, prefix, sending.url)
    crc = _OrderedCrc32c()

    def send(content: PartContent) -> Blob:
        name = f"{prefix}{content.part.number:05d}"
        found = stored.get(name)
        if found is not None and _is_of(found, content):
            return found
        return _put_part(bucket, name, sending, content)

    blobs = send_parts(sending, parts, send, in_flight=in_flight, observe=crc.update)
    whole = _join(bucket, key, prefix, sending, blobs)
    _check_whole(bucket, key, sending, whole, crc.base64())
    with contextlib.suppress(StorageError):
        delete_keys(bucket, sorted(_blobs_below(bucket, prefix, sending.url)))


def _put_part(
    bucket: GcsBucket, key: str, sending: Sending, content: PartContent
) -> Blob:
    return put_bytes(
        bucket,
        key,
        sending.url,
        content.content,
        begin=lambda: sending.take(len(content.content)),
        cancelled=sending.cancelled,
    )


def _join(
    bucket: GcsBucket, key: str, prefix: str, sending: Sending, blobs: Sequence[Blob]
) -> Blob:
    """Join the parts; the file appears under its name by the last request, whole."""
    rest, n_joined = list(blobs), 0
    while len(rest) > MOST_JOINED:
        name = f"{prefix}joined-{n_joined:05d}"
        first = join_blobs(bucket, name, sending.url, rest[:MOST_JOINED], None)
        rest = [first, *rest[MOST_JOINED:]]
        n_joined += 1
    return join_blobs(bucket, key, sending.url, rest, sending.sha256)


def _check_whole(
    bucket: GcsBucket, key: str, sending: Sending, whole: Blob, crc32c: str
) -> None:
    if (whole.size, whole.crc32c) == (sending.nbytes, crc32c):
        return
    delete_keys(bucket, [key])
    message = (
        f"cannot upload {sending.url}: the store has {whole.size} bytes of CRC-32C "
        f"{whole.crc32c}, sent were {sending.nbytes} of {crc32c}; it is removed"
    )
    raise StorageError(message, errno=errno.EIO, path=sending.url)


def _blobs_below(bucket: GcsBucket, prefix: str, place: str) -> dict[str, Blob]:
    def list_all(client: Any) -> dict[str, Blob]:
        return {b.name: b for b in client.list_blobs(prefix=prefix, **bucket.how)}

    return bucket.run("look for parts of", place, list_all)


def _is_of(blob: Blob, content: PartContent) -> bool:
    if blob.size != content.part.nbytes or blob.crc32c != _crc32c(content.content):
        return False
    digest = hashlib.md5(content.content, usedforsecurity=False).digest()
    return blob.md5_hash in (None, base64.b64encode(digest).decode())


def _crc32c(content: bytes) -> str:
    crc = _OrderedCrc32c()
    crc.update(content)
    return crc.base64()


class _OrderedCrc32c:
    """The CRC-32C of bytes that come in order, as the store writes it."""

    def __init__(self) -> None:
        import google_crc32c

        self._crc: Any = cast(Any, google_crc32c).Checksum()

    def update(self, content: bytes) -> None:
        """Go on with the next bytes."""
        self._crc.update(content)

    def base64(self) -> str:
        """Return it as the store writes it."""
        return base64.b64encode(self._crc.digest()).decode()
