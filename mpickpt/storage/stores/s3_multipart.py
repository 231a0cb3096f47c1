"""The calls of S3's multipart uploads: begin, find again, list, complete, abort."""

import base64
import errno
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from mpickpt.errors import StorageError
from mpickpt.storage.stores.parts import PartContent, Sending
from mpickpt.storage.stores.s3_bucket import Bucket, PacedBody
from mpickpt.storage.stores.s3_errors import checked_answer
from mpickpt.storage.stores.s3_object import (
    SHA256_METADATA,
    S3Object,
    etag_is_of,
    is_confirmed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpload:
    """A multipart upload that has begun.

    Attributes
    ----------
    key : str
        Of the object that it is for.
    id : str
        What S3 calls it.
    age_s : float
        Since it began, by the store's clock.
    """

    key: str
    id: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPart:
    """A part that the store has.

    Attributes
    ----------
    named : mapping
        How the request that completes the upload names it.
    is_confirmed : bool
        Whether the store has shown that it has the bytes that were sent.
    """

    named: Mapping[str, Any]
    is_confirmed: bool


def unfinished_uploads(
    bucket: Bucket, prefix: str, place: str
) -> Iterator[UnfinishedUpload]:
    """Yield the uploads that have begun for keys with a prefix."""
    where: dict[str, Any] = {"Bucket": bucket.name, "Prefix": prefix}
    while True:
        page = bucket.run(
            "look for unfinished uploads to",
            place,
            lambda c: checked_answer(c.list_multipart_uploads(**where), "Bucket"),
        )
        now = _time_of(page)
        for found in page.get("Uploads", ()):
            age_s = (now - found["Initiated"]).total_seconds()
            yield UnfinishedUpload(
                key=found["Key"], id=found["UploadId"], age_s=max(age_s, 0.0)
            )
        if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
            return
        where["KeyMarker"] = page["NextKeyMarker"]
        where["UploadIdMarker"] = page.get("NextUploadIdMarker", "")


def begin_upload(target: S3Object, sha256: str) -> str:
    """Begin an upload and return its id; the object is going to tell its digest."""
    begun = target.bucket.run(
        "begin the upload of",
        target.url,
        lambda c: checked_answer(
            c.create_multipart_upload(
                **target.where,
                ChecksumAlgorithm="SHA256",
                Metadata={SHA256_METADATA: sha256},
            ),
            "UploadId",
        ),
    )
    return str(begun["UploadId"])


def parts_of(target: S3Object, upload_id: str) -> dict[int, dict[str, Any]]:
    """Return what the store has of an unfinished upload, by part number."""
    where = {**target.where, "UploadId": upload_id}
    parts: dict[int, dict[str, Any]] = {}
    while True:
        page = target.bucket.run(
            "list the parts of",
            target.url,
            lambda c: checked_answer(c.list_parts(**where), "UploadId"),
        )
        parts |= {found["PartNumber"]: found for found in page.get("Parts", ())}
        marker = page.get("NextPartNumberMarker")
        if not page.get("IsTruncated") or not marker:
            return parts
        where["PartNumberMarker"] = marker


def send_part(
    target: S3Object, upload_id: str, sending: Sending, content: PartContent
) -> SentPart:
    """Send a part; a store that checks has it whole when this returns."""
    answer = target.bucket.run(
        "upload",
        target.url,
        lambda c: checked_answer(
            c.upload_part(
                **target.where,
                UploadId=upload_id,
                PartNumber=content.part.number,
                Body=PacedBody(content.content, sending),
                ChecksumSHA256=_base64(content.sha256),
            ),
            "ETag",
        ),
        cancelled=sending.cancelled,
    )
    return SentPart(
        named=_named(answer, content),
        is_confirmed=is_confirmed(answer, content.content, content.sha256),
    )


def found_part(found: Mapping[str, Any], content: PartContent) -> SentPart | None:
    """Return a part that the store has, if it is of these very bytes."""
    if found["Size"] != content.part.nbytes:
        return None
    stored = found.get("ChecksumSHA256")
    if stored is not None:
        is_same = stored == _base64(content.sha256)
    else:
        is_same = etag_is_of(found["ETag"], content.content)
    return (
        SentPart(named=_named(found, content), is_confirmed=True) if is_same else None
    )


def complete_upload(target: S3Object, upload_id: str, parts: list[SentPart]) -> None:
    """Make the object of its parts."""
    whole = {"Parts": [part.named for part in parts]}
    target.bucket.run(
        "complete the upload of",
        target.url,
        lambda c: checked_answer(
            c.complete_multipart_upload(
                **target.where, UploadId=upload_id, MultipartUpload=whole
            ),
            "ETag",
        ),
    )


def abort_upload(target: S3Object, upload_id: str) -> None:
    """Remove what an unfinished upload has left; one that is gone is fine."""
    try:
        target.bucket.run(
            "abort the upload of",
            target.url,
            lambda c: c.abort_multipart_upload(**target.where, UploadId=upload_id),
        )
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise


def _named(answer: Mapping[str, Any], content: PartContent) -> dict[str, Any]:
    named = {"PartNumber": content.part.number, "ETag": answer["ETag"]}
    # AWS and others want it here where the upload was begun with it, and lists of parts
    # may lack it; those that know none ignore it.
    return named | {"ChecksumSHA256": _base64(content.sha256)}


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _time_of(answer: Mapping[str, Any]) -> datetime:
    """Return when the store answered, by its clock, or by ours."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return parsedate_to_datetime(headers["date"])
    except (KeyError, ValueError, TypeError):
        return datetime.now(UTC)
