"""Writes, joins and removes objects of Google Cloud Storage."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mpickpt.errors import StorageError
from mpickpt.storage.stores.failures import Cancellation
from mpickpt.storage.stores.gcs_bucket import (
    PRECONDITION_FAILED,
    Blob,
    GcsBucket,
    status_of,
)

SHA256_METADATA = "sha256"

# What one request joins at most.
MOST_JOINED = 32

_DELETED_AT_ONCE = 8


def put_bytes(
    bucket: GcsBucket,
    key: str,
    place: str,
    content: bytes,
    *,
    begin: Callable[[], None] | None = None,
    cancelled: Cancellation | None = None,
) -> Blob:
    """Write an object in one piece; what is stored has the CRC-32C of what was sent.

    Parameters
    ----------
    key, place : str
        Its name in the bucket, and how errors name it.
    begin : callable, optional
        Called before each try: it may wait for bandwidth.
    """

    def put(client: Any) -> Blob:
        if begin is not None:
            begin()
        blob = client.blob(key)
        blob.metadata = {SHA256_METADATA: hashlib.sha256(content).hexdigest()}
        blob.upload_from_string(
            content,
            content_type="application/octet-stream",
            checksum="crc32c",
            **bucket.how,
        )
        return blob

    return bucket.run("write", place, put, cancelled=cancelled)


def put_new_bytes(bucket: GcsBucket, key: str, place: str, content: bytes) -> bool:
    """Write an object unless it is there."""
    n_tries = 0

    def put(client: Any) -> None:
        nonlocal n_tries
        n_tries += 1
        client.blob(key).upload_from_string(
            content,
            content_type="application/octet-stream",
            checksum="crc32c",
            if_generation_match=0,
            **bucket.how,
        )

    def get(client: Any) -> bytes:
        return bytes(client.blob(key).download_as_bytes(**bucket.how))

    try:
        bucket.run("write", place, put)
    except StorageError as error:
        if status_of(error.__cause__) != PRECONDITION_FAILED:
            raise
        # The answer to a try that succeeded may have been lost on its way.
        return n_tries > 1 and bucket.run("read", place, get) == content
    return True


def join_blobs(
    bucket: GcsBucket, key: str, place: str, blobs: Sequence[Blob], sha256: str | None
) -> Blob:
    """Make one object of several, at once, from what the store has."""

    def join(client: Any) -> Blob:
        whole = client.blob(key)
        whole.content_type = "application/octet-stream"
        if sha256 is not None:
            whole.metadata = {SHA256_METADATA: sha256}
        whole.compose(list(blobs), **bucket.how)
        if not int(whole.size):
            raise ConnectionError("the answer was cut: it tells no size")
        return whole

    return bucket.run("join the parts of", place, join)


def delete_keys(bucket: GcsBucket, keys: Sequence[str]) -> None:
    """Remove objects, also those that are not there."""
    from google.api_core.exceptions import NotFound

    def delete(key: str) -> None:
        def call(client: Any) -> None:
            try:
                client.blob(key).delete(**bucket.how)
            except NotFound:
                return

        bucket.run("remove", f"gs://{bucket.name}/{key}", call)

    with ThreadPoolExecutor(_DELETED_AT_ONCE) as pool:
        for _ in pool.map(delete, keys):
            pass
