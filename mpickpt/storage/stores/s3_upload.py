"""Uploads one file to S3, so that what a crash leaves behind is not sent again.

Where an upload stopped is asked of the store, by the key; no file of ours keeps the id
of the upload. So another process on another node can go on, a lost home directory costs
nothing, and there is no second truth. What the store lists is believed only part by
part: a part counts if its size and its digest are those of the bytes at hand.
"""

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Sequence

from mpickpt.errors import CorruptShardError, IncompleteCheckpointError, StorageError
from mpickpt.storage.stores.parts import (
    Part,
    PartContent,
    Sending,
    read_parts,
    send_parts,
)
from mpickpt.storage.stores.s3_errors import is_final
from mpickpt.storage.stores.s3_multipart import (
    SentPart,
    UnfinishedUpload,
    abort_upload,
    begin_upload,
    complete_upload,
    found_part,
    parts_of,
    send_part,
    unfinished_uploads,
)
from mpickpt.storage.stores.s3_object import S3Object

log = logging.getLogger(__name__)


class _OtherBytesError(Exception):
    """Report an unfinished upload of another file, or of other parts of this one."""


def upload_whole(target: S3Object, sending: Sending, parts: Sequence[Part]) -> None:
    """Upload a file of one part in one request."""
    (content,) = read_parts(sending, parts)
    target.put(content.content, sending=sending)
    sending.tell(sending.nbytes)


def upload_in_parts(
    target: S3Object, sending: Sending, parts: Sequence[Part], *, in_flight: int
) -> None:
    """Upload a file of several parts, from where an upload before this one stopped.

    Raises
    ------
    CorruptShardError, IncompleteCheckpointError
        The source is not what the manifest says; nothing of it stays in the store.
    StorageError
        The store refuses; what it has is found by the next upload.
    """
    unfinished = _unfinished(target)
    went_on = bool(unfinished) and _goes_on(
        target, sending, parts, unfinished[0].id, in_flight
    )
    if not went_on:
        upload_id = begin_upload(target, sending.sha256)
        _send_all(target, sending, parts, upload_id, in_flight)
    for left in unfinished[went_on:]:
        with contextlib.suppress(StorageError):
            abort_upload(target, left.id)


def _unfinished(target: S3Object) -> list[UnfinishedUpload]:
    """Return the uploads to this very key that have begun, the newest first."""
    try:
        found = list(unfinished_uploads(target.bucket, target.key, target.url))
    except StorageError as error:
        # It takes a right of its own, and some stores have no such list.
        log.info("%s; the upload begins from the start", error)
        return []
    return sorted((u for u in found if u.key == target.key), key=lambda u: u.age_s)


def _goes_on(
    target: S3Object,
    sending: Sending,
    parts: Sequence[Part],
    upload_id: str,
    in_flight: int,
) -> bool:
    """Finish an upload that has begun.

    False if the store takes no more for it, or if it was for other bytes: then the
    object, if it came to be one, bears another digest.
    """
    told = 0

    def tell(nbytes: int) -> None:
        nonlocal told
        told += nbytes
        sending.tell(nbytes)

    going_on = dataclasses.replace(sending, progress=tell)
    try:
        _send_all(target, going_on, parts, upload_id, in_flight)
        if target.is_whole(sending.nbytes, sending.sha256):
            return True
    except (StorageError, _OtherBytesError) as error:
        if isinstance(error, StorageError) and not is_final(error):
            raise
        log.info("%s; the upload begins from the start", error)
        abort_upload(target, upload_id)
    sending.tell(-told)
    return False


def _send_all(
    target: S3Object,
    sending: Sending,
    parts: Sequence[Part],
    upload_id: str,
    in_flight: int,
) -> None:
    try:
        sent = _send_missing(target, sending, parts, upload_id, in_flight)
        complete_upload(target, upload_id, sent)
    except (CorruptShardError, IncompleteCheckpointError):
        with contextlib.suppress(StorageError):
            abort_upload(target, upload_id)
        raise
    except StorageError as error:
        # Another process went on with the same upload, or the answer was lost.
        is_gone = error.errno == errno.ENOENT
        if is_gone and target.is_whole(sending.nbytes, sending.sha256):
            return
        raise
    if not all(part.is_confirmed for part in sent):
        target.confirm(sending.sha256)


def _send_missing(
    target: S3Object,
    sending: Sending,
    parts: Sequence[Part],
    upload_id: str,
    in_flight: int,
) -> list[SentPart]:
    stored = parts_of(target, upload_id)

    def send(content: PartContent) -> SentPart:
        there = stored.get(content.part.number)
        if there is None:
            return send_part(target, upload_id, sending, content)
        found = found_part(there, content)
        if found is None:
            raise _OtherBytesError(f"the parts of {target.url} are of other bytes")
        return found

    return send_parts(sending, parts, send, in_flight=in_flight)
