"""A store in Google Cloud Storage."""

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from mpickpt.errors import StorageError
from mpickpt.storage.stores.failures import Cancellation
from mpickpt.storage.stores.gcs_blobs import (
    SHA256_METADATA,
    delete_keys,
    put_bytes,
    put_new_bytes,
)
from mpickpt.storage.stores.gcs_bucket import (
    Blob,
    gcs_bucket_of,
    is_past_the_end,
)
from mpickpt.storage.stores.gcs_upload import upload_in_parts, upload_whole
from mpickpt.storage.stores.names import (
    checked_name,
    directory_prefix,
    is_of_parts,
    owner_of_part,
    probe_name,
    split_bucket_url,
)
from mpickpt.storage.stores.parts import Sending, plan_parts
from mpickpt.storage.stores.ranges import Filling
from mpickpt.storage.stores.store import (
    Names,
    Pace,
    Progress,
    StoredFile,
    StoreOptions,
)

# More would take too many requests to join them.
_MOST_PARTS = 2048


class GcsStore:
    """A `Store` below one prefix of a bucket.

    Parameters
    ----------
    url : str
        gs://bucket or gs://bucket/prefix.
    options : StoreOptions
        How it is talked to.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        bucket, self._prefix, self._url = split_bucket_url(url, "gs")
        self._options = options
        self._bucket = gcs_bucket_of(bucket, options)

    @property
    def url(self) -> str:
        """Where it is."""
        return self._url

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield the files whose names begin with `prefix`."""
        for blobs, _ in self._pages(prefix):
            for blob in blobs:
                if owner_of_part(blob.name) is None:
                    yield self._stored(blob)

    def directories(self, prefix: str = "") -> Names:
        """Return the names of the directories right below one."""
        pages = self._pages(directory_prefix(prefix), delimiter="/")
        found = {name[len(self._prefix) :] for _, names in pages for name in names}
        named = (name.rstrip("/") for name in found)
        return sorted(name for name in named if not is_of_parts(name))

    def stat(self, name: str) -> StoredFile | None:
        """Return what the store says about a file; None where there is none."""
        key = self._key(name)

        def look(bucket: Any) -> StoredFile | None:
            found = bucket.get_blob(key, **self._bucket.how)
            return None if found is None else self._stored(found)

        return self._bucket.run("look at", self._place(name), look)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a file."""
        stop = None if nbytes is None else offset + nbytes
        return b"" if nbytes == 0 else self._read(name, offset, stop)

    def read_into(self, name: str, view: memoryview, offset: int = 0) -> int:
        """Fill `view` from a file and return the bytes read."""
        filling = Filling(view, offset)
        if filling.start < filling.stop:
            filling.take(self._read(name, filling.start, filling.stop))
        return filling.done

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, replacing the one of that name at once."""
        put_bytes(self._bucket, self._key(name), self._place(name), content)

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file unless there is one of that name."""
        key, place = self._key(name), self._place(name)
        return put_new_bytes(self._bucket, key, place, content)

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
        found = self.stat(name)
        if found is not None and (found.nbytes, found.sha256) == (nbytes, sha256):
            if progress is not None:
                progress(nbytes)
            return
        sending = Sending(
            url=self._place(name),
            source=source,
            nbytes=nbytes,
            sha256=sha256,
            pace=pace,
            cancelled=Cancellation(cancelled),
            progress=progress,
        )
        parts = plan_parts(nbytes, self._options.part_nbytes, _MOST_PARTS)
        if len(parts) == 1:
            upload_whole(self._bucket, self._key(name), sending, parts)
        else:
            in_flight = self._options.in_flight
            upload_in_parts(self._bucket, self._key(name), sending, parts, in_flight)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, also those that are not there."""
        delete_keys(self._bucket, [self._key(name) for name in names])

    def abort_leftovers(self, prefix: str = "", older_than_s: float = 0.0) -> int:
        """Remove parts of unfinished uploads and return how many uploads there were."""
        directory, slash, _ = prefix.rpartition("/")
        times: dict[str, float] = {}
        parts: dict[str, Names] = {}
        for blobs, _ in self._pages(directory + slash):
            for blob in blobs:
                owner = owner_of_part(blob.name[len(self._prefix) :])
                if owner is not None and owner.startswith(prefix):
                    parts.setdefault(owner, []).append(blob.name)
                    written_s = blob.updated.timestamp()
                    times[owner] = max(written_s, times.get(owner, 0.0))
        now_s = time.time()
        old = [owner for owner in parts if now_s - times[owner] >= older_than_s]
        delete_keys(self._bucket, [key for owner in old for key in parts[owner]])
        return len(old)

    def check_conditions(self) -> bool:
        """Tell whether `put_new` is atomic here; asked of the store once a process."""
        if self._bucket.honours_conditions is None:
            name = probe_name()
            try:
                honours = self.put_new(name, b"first")
                honours = honours and not self.put_new(name, b"second")
            finally:
                with contextlib.suppress(StorageError):
                    delete_keys(self._bucket, [self._key(name)])
            self._bucket.honours_conditions = honours
        return self._bucket.honours_conditions

    def _read(self, name: str, start: int, stop: int | None) -> bytes:
        key, last = self._key(name), None if stop is None else stop - 1

        def download(bucket: Any) -> bytes:
            # The digests of a checkpoint are checked by whoever reads it.
            blob = bucket.blob(key)
            content = blob.download_as_bytes(
                start=start,
                end=last,
                raw_download=True,
                checksum=None,
                **self._bucket.how,
            )
            if blob.content_type is None:
                raise ConnectionError("the answer was cut: it tells no type")
            return bytes(content)

        try:
            return self._bucket.run("read", self._place(name), download)
        except StorageError as error:
            if not is_past_the_end(error):
                raise
            return b""

    def _pages(
        self, prefix: str, delimiter: str | None = None
    ) -> Iterator[tuple[Sequence[Blob], Collection[str]]]:
        """Yield blobs and directories, page by page, so that one try is one page."""
        token: str | None = None
        while True:

            def page(bucket: Any, token: str | None = token) -> Any:
                found = bucket.list_blobs(
                    prefix=self._prefix + prefix,
                    delimiter=delimiter,
                    page_token=token,
                    **self._bucket.how,
                )
                blobs = tuple(next(found.pages, ()))
                return blobs, tuple(found.prefixes), found.next_page_token

            blobs, names, token = self._bucket.run("list", self._place(prefix), page)
            yield blobs, names
            if not token:
                return

    def _stored(self, blob: Blob) -> StoredFile:
        return StoredFile(
            name=blob.name[len(self._prefix) :],
            nbytes=int(blob.size),
            sha256=(blob.metadata or {}).get(SHA256_METADATA),
            modified_s=blob.updated.timestamp() if blob.updated else None,
        )

    def _key(self, name: str) -> str:
        return self._prefix + checked_name(name)

    def _place(self, name: str) -> str:
        return f"{self._url}/{name}" if name else self._url
