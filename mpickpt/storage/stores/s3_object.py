"""One object of S3: looked at, read and written."""

import base64
import contextlib
import errno
import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpickpt.errors import StorageError
from mpickpt.storage.stores.parts import Sending
from mpickpt.storage.stores.ranges import CHUNK_NBYTES, Filling
from mpickpt.storage.stores.s3_bucket import Bucket, PacedBody
from mpickpt.storage.stores.s3_errors import (
    PRECONDITION_FAILED,
    checked_answer,
    code_of,
)
from mpickpt.storage.stores.store import StoredFile

SHA256_METADATA = "sha256"

_BAD_REQUEST = "400"
_MD5 = re.compile('"?([0-9a-f]{32})"?')


@dataclass(frozen=True, slots=True)
class S3Object:
    """A key in a bucket, whether something is there or not.

    Parameters
    ----------
    bucket : Bucket
        Where it is.
    key : str
        Its name there.
    url : str
        How errors name it.
    """

    bucket: Bucket
    key: str
    url: str

    @property
    def where(self) -> dict[str, Any]:
        """The arguments of boto3 that name it."""
        return {"Bucket": self.bucket.name, "Key": self.key}

    def stat(self, name: str) -> StoredFile | None:
        """Return what the store says about it, under a name; None if it is absent."""
        try:
            found = self.bucket.run("look at", self.url, self._head)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        # Some stores change the case of names: these are HTTP headers.
        kept = {key.lower(): value for key, value in found.get("Metadata", {}).items()}
        return StoredFile(
            name=name,
            nbytes=found["ContentLength"],
            sha256=kept.get(SHA256_METADATA),
            modified_s=found["LastModified"].timestamp(),
        )

    def is_whole(self, nbytes: int, sha256: str) -> bool:
        """Tell whether an upload of this content has been completed here."""
        found = self.stat("")
        return found is not None and (found.nbytes, found.sha256) == (nbytes, sha256)

    def read_into(self, filling: Filling) -> int:
        """Fill a buffer; fewer bytes come where the object ends."""

        def get(client: Any) -> None:
            if filling.start < filling.stop:
                answer = checked_answer(
                    client.get_object(**self.where, Range=filling.header),
                    "ContentLength",
                )
                self._check_range(answer, filling.start)
                # Not the body's own context manager, which leaves its checks out.
                with contextlib.closing(answer["Body"]) as body:
                    wanted = filling.done + answer["ContentLength"]
                    filling.take_from(body.read)
                _check_length(filling.done, wanted)

        try:
            self.bucket.run("read", self.url, get, so_far=lambda: filling.done)
        except StorageError as error:
            if not _begins_past_the_end(error):
                raise
        return filling.done

    def read_rest(self, offset: int = 0) -> bytes:
        """Return all from an offset on."""
        how = {"Range": f"bytes={offset}-"} if offset else {}

        def get(client: Any) -> bytes:
            answer = client.get_object(**self.where, **how)
            checked_answer(answer, "ContentLength")
            self._check_range(answer, offset)
            with contextlib.closing(answer["Body"]) as body:
                content = bytes(body.read())
            _check_length(len(content), answer["ContentLength"])
            return content

        try:
            return self.bucket.run("read", self.url, get)
        except StorageError as error:
            if not _begins_past_the_end(error):
                raise
            return b""

    def put(
        self,
        content: bytes,
        *,
        sending: Sending | None = None,
        tries: list[None] | None = None,
        **how: Any,
    ) -> None:
        """Write it in one request; the store has these very bytes when this returns."""
        digest = hashlib.sha256(content).digest()

        def put(client: Any) -> Any:
            if tries is not None:
                tries.append(None)
            body = PacedBody(content, sending) if sending else io.BytesIO(content)
            answer = client.put_object(**self.where, Body=body, **given)
            return checked_answer(answer, "ETag")

        given = {
            "ChecksumSHA256": base64.b64encode(digest).decode(),
            "Metadata": {SHA256_METADATA: digest.hex()},
            **how,
        }
        cancelled = sending.cancelled if sending else None
        answer = self.bucket.run("write", self.url, put, cancelled=cancelled)
        if not is_confirmed(answer, content, digest):
            self.confirm(digest.hex())

    def put_new(self, content: bytes) -> bool:
        """Write it unless it is there, if the store honours the condition."""
        tries: list[None] = []
        try:
            self.put(content, tries=tries, IfNoneMatch="*")
        except StorageError as error:
            if code_of(error.__cause__) != PRECONDITION_FAILED:
                raise
            # The answer to a try that succeeded may have been lost on its way.
            return len(tries) > 1 and self._is_own(content)
        return True

    def _head(self, client: Any) -> Any:
        try:
            answer = client.head_object(**self.where)
            return checked_answer(answer, "ContentLength", "LastModified", "ETag")
        except Exception as error:
            # The answer to a HEAD has no text; AWS says so of expired credentials too.
            if code_of(error) == _BAD_REQUEST:
                client.get_object(**self.where, Range="bytes=0-0")["Body"].close()
            raise

    def _is_own(self, content: bytes) -> bool:
        try:
            return self.read_rest() == content
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return False
            raise

    def _check_range(self, answer: Mapping[str, Any], offset: int) -> None:
        # By the header: some stores send the range that was asked for with a 200.
        came = answer.get("ContentRange", "the whole")
        if offset and not came.startswith(f"bytes {offset}-"):
            message = (
                f"cannot read {self.url}: byte {offset} on was asked for, {came} came"
            )
            raise StorageError(message, errno=errno.EIO, path=self.url)

    def confirm(self, sha256: str) -> None:
        """Read it back where the store has told no digest; remove it if it is wrong."""
        found, offset = hashlib.sha256(), 0
        buffer = memoryview(bytearray(CHUNK_NBYTES))
        while n := self.read_into(Filling(buffer, offset)):
            found.update(buffer[:n])
            offset += n
        if found.hexdigest() == sha256:
            return
        self.bucket.run("remove", self.url, lambda c: c.delete_object(**self.where))
        message = (
            f"cannot write {self.url}: other bytes arrived (SHA-256 "
            f"{found.hexdigest()}) than were sent ({sha256}), and the store did not "
            "notice; they are removed"
        )
        raise StorageError(message, errno=errno.EIO, path=self.url)


def _check_length(came: int, wanted: int) -> None:
    if came != wanted:
        raise ConnectionError(f"the connection ended after {came} of {wanted} bytes")


def _begins_past_the_end(error: StorageError) -> bool:
    return code_of(error.__cause__) in ("InvalidRange", "416")


def is_confirmed(answer: Mapping[str, Any], content: bytes, sha256: bytes) -> bool:
    """Tell whether the store's answer shows that it has these very bytes.

    Stores that know no SHA-256 give the MD5 as ETag, unless they encrypt.
    """
    stored = answer.get("ChecksumSHA256")
    if stored is not None:
        return bool(stored == base64.b64encode(sha256).decode())
    return etag_is_of(answer.get("ETag", ""), content)


def etag_is_of(etag: str, content: bytes) -> bool:
    """Tell whether an ETag is the MD5 of these bytes."""
    match = _MD5.fullmatch(etag)
    if match is None:
        return False
    return hashlib.md5(content, usedforsecurity=False).hexdigest() == match[1]
