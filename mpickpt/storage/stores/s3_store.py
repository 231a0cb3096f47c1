"""A store in S3, or in what speaks its protocol."""

import contextlib
import errno
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

from mpickpt.errors import StorageError
from mpickpt.storage.stores.failures import Cancellation
from mpickpt.storage.stores.names import (
    checked_name,
    directory_prefix,
    probe_name,
    split_bucket_url,
)
from mpickpt.storage.stores.parts import Sending, plan_parts
from mpickpt.storage.stores.ranges import Filling
from mpickpt.storage.stores.s3_bucket import bucket_of
from mpickpt.storage.stores.s3_errors import checked_answer, code_of
from mpickpt.storage.stores.s3_multipart import abort_upload, unfinished_uploads
from mpickpt.storage.stores.s3_object import S3Object
from mpickpt.storage.stores.s3_upload import upload_in_parts, upload_whole
from mpickpt.storage.stores.store import (
    Names,
    Pace,
    Progress,
    StoredFile,
    StoreOptions,
)

_MOST_PARTS = 10_000
_MOST_DELETED = 1000


class S3Store:
    """A `Store` below one prefix of a bucket.

    Parameters
    ----------
    url : str
        s3://bucket or s3://bucket/prefix.
    options : StoreOptions
        How it is talked to.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        bucket, self._prefix, self._url = split_bucket_url(url, "s3")
        self._options = options
        self._bucket = bucket_of(bucket, options)

    @property
    def url(self) -> str:
        """Where it is."""
        return self._url

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield the files whose names begin with `prefix`."""
        for page in self._pages(prefix):
            for found in page.get("Contents", ()):
                yield StoredFile(
                    name=found["Key"][len(self._prefix) :],
                    nbytes=found["Size"],
                    modified_s=found["LastModified"].timestamp(),
                )

    def directories(self, prefix: str = "") -> Names:
        """Return the names of the directories right below one."""
        names = (
            found["Prefix"]
            for page in self._pages(directory_prefix(prefix), Delimiter="/")
            for found in page.get("CommonPrefixes", ())
        )
        return sorted(name[len(self._prefix) :].rstrip("/") for name in names)

    def stat(self, name: str) -> StoredFile | None:
        """Return what the store says about a file; None where there is none."""
        return self._object(name).stat(name)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a file."""
        if nbytes is None:
            return self._object(name).read_rest(offset)
        content = bytearray(nbytes)
        return bytes(content[: self.read_into(name, memoryview(content), offset)])

    def read_into(self, name: str, view: memoryview, offset: int = 0) -> int:
        """Fill `view` from a file and return the bytes read."""
        return self._object(name).read_into(Filling(view, offset))

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, replacing the one of that name at once."""
        self._object(name).put(content)

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file unless there is one of that name."""
        target = self._object(name)
        if self.check_conditions():
            return target.put_new(content)
        if target.stat(name) is not None:
            return False
        target.put(content)
        return True

    def upload(
        self,
        name: str,
        source: Path,
        *,
        nbytes: int,
        sha256: str,
        pace: Pace | None = None,
        cancelled: Event | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file of this node into the store; see `Store.upload`."""
        target = self._object(name)
        if target.is_whole(nbytes, sha256):
            if progress is not None:
                progress(nbytes)
            return
        sending = Sending(
            url=target.url,
            source=source,
            nbytes=nbytes,
            sha256=sha256,
            pace=pace,
            cancelled=Cancellation(cancelled),
            progress=progress,
        )
        parts = plan_parts(nbytes, self._options.part_nbytes, _MOST_PARTS)
        if len(parts) == 1:
            upload_whole(target, sending, parts)
        else:
            upload_in_parts(target, sending, parts, in_flight=self._options.in_flight)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, also those that are not there."""
        keys = sorted({self._prefix + checked_name(name) for name in names})
        for start in range(0, len(keys), _MOST_DELETED):
            self._delete(keys[start : start + _MOST_DELETED])

    def abort_leftovers(self, prefix: str = "", older_than_s: float = 0.0) -> int:
        """Abort unfinished uploads and return how many there were."""
        n_aborted = 0
        place = self._place(prefix)
        for found in unfinished_uploads(self._bucket, self._prefix + prefix, place):
            if found.age_s >= older_than_s:
                abort_upload(S3Object(self._bucket, found.key, place), found.id)
                n_aborted += 1
        return n_aborted

    def check_conditions(self) -> bool:
        """Tell whether `put_new` is atomic here; asked of the store once a process."""
        if self._bucket.honours_conditions is None:
            self._bucket.honours_conditions = self._probe_conditions()
        return self._bucket.honours_conditions

    def _probe_conditions(self) -> bool:
        probe = self._object(probe_name())
        try:
            return probe.put_new(b"first") and not probe.put_new(b"second")
        except StorageError as error:
            if code_of(error.__cause__) in ("NotImplemented", "InvalidArgument"):
                return False
            raise
        finally:
            with contextlib.suppress(StorageError):
                self._delete([probe.key])

    def _pages(self, prefix: str, **how: Any) -> Iterator[dict[str, Any]]:
        where = {"Bucket": self._bucket.name, "Prefix": self._prefix + prefix, **how}
        token: str | None = None
        while True:

            def get(client: Any, token: str | None = token) -> Any:
                rest = {"ContinuationToken": token} if token else {}
                answer = client.list_objects_v2(**where, **rest)
                return checked_answer(answer, "IsTruncated")

            page = self._bucket.run("list", self._place(prefix), get)
            yield page
            token = page.get("NextContinuationToken")
            if not token:
                return

    def _delete(self, keys: Names) -> None:
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": False}

        def delete(client: Any) -> Any:
            answer = client.delete_objects(Bucket=self._bucket.name, Delete=wanted)
            told = [*answer.get("Deleted", ()), *answer.get("Errors", ())]
            if len(told) < len(keys):
                raise ConnectionError(f"the answer tells of {len(told)} of {len(keys)}")
            return answer

        answer = self._bucket.run("remove files of", self._url, delete)
        for failed in answer.get("Errors", ()):
            code, key = failed.get("Code", ""), failed.get("Key", "")
            if code == "NoSuchKey":
                continue
            number = errno.EACCES if code == "AccessDenied" else errno.EIO
            url = f"s3://{self._bucket.name}/{key}"
            message = f"cannot remove {url}: {code} {failed.get('Message', '')}"
            raise StorageError(message, errno=number, path=url)

    def _object(self, name: str) -> S3Object:
        key = self._prefix + checked_name(name)
        return S3Object(self._bucket, key, self._place(name))

    def _place(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url
