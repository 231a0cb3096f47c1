"""A store in whatever fsspec knows: Azure, SFTP, SMB, HDFS, WebDAV, ...

The general case, with what all of them have: a file is read back after it was written,
since no digest of theirs is common to all, and an upload that is cut begins again.
"""

import contextlib
import errno
import hashlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from mpickpt.errors import StorageError
from mpickpt.format.naming import parse_temporary_name, temporary_name
from mpickpt.storage.stores.failures import (
    CHECK_CREDENTIALS,
    Cancellation,
    Failure,
    Retries,
)
from mpickpt.storage.stores.missing_client import needs
from mpickpt.storage.stores.names import checked_name, directory_prefix
from mpickpt.storage.stores.parts import Sending, plan_parts, read_parts
from mpickpt.storage.stores.ranges import CHUNK_NBYTES, Filling
from mpickpt.storage.stores.store import (
    Names,
    Pace,
    Progress,
    StoredFile,
    StoreOptions,
)

T = TypeVar("T")

_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


class FsspecStore:
    """A `Store` below a URL of fsspec.

    Parameters
    ----------
    url : str
        protocol://host-or-container/path.
    options : StoreOptions
        How it is talked to; the time-outs are those of fsspec's file system, which its
        own configuration sets.

    Notes
    -----
    `put_new` looks first: fsspec promises no atomic condition, so `check_conditions` is
    false. `stat` tells no digest.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        self._url = url.rstrip("/")
        self._options = options
        self._retries = Retries(explain=_explain, for_s=options.retry_for_s)
        with needs("fsspec or what it takes", url):
            self._fs, self._root = _open(url)

    @property
    def url(self) -> str:
        """Where it is."""
        return self._url

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield the files whose names begin with `prefix`."""
        directory = self._root + "/" + prefix.rpartition("/")[0]
        found = self._run(
            "list", directory, lambda: self._fs.find(directory.rstrip("/"), detail=True)
        )
        for path, known in sorted(found.items()):
            name = path[len(self._root) :].lstrip("/")
            if name.startswith(prefix) and parse_temporary_name(name) is None:
                yield _stored(name, known)

    def directories(self, prefix: str = "") -> Names:
        """Return the names of the directories right below one."""
        below = directory_prefix(prefix)
        path = f"{self._root}/{below}".rstrip("/")

        def names() -> Names:
            try:
                found = self._fs.ls(path, detail=True, refresh=True)
            except FileNotFoundError:
                return []
            return [known["name"] for known in found if known["type"] == "directory"]

        found = self._run("list", path, names)
        return sorted(below + name.rstrip("/").rpartition("/")[2] for name in found)

    def stat(self, name: str) -> StoredFile | None:
        """Return what the store says about a file; None where there is none."""
        path = self._path(name)

        def look() -> StoredFile | None:
            try:
                known = self._fs.info(path)
            except FileNotFoundError:
                return None
            return _stored(name, known) if known["type"] == "file" else None

        return self._run("look at", path, look)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a file."""
        path, end = self._path(name), None if nbytes is None else offset + nbytes
        if nbytes == 0:
            return b""
        return self._run(
            "read", path, lambda: bytes(self._fs.cat_file(path, start=offset, end=end))
        )

    def read_into(self, name: str, view: memoryview, offset: int = 0) -> int:
        """Fill `view` from a file and return the bytes read."""
        filling = Filling(view, offset)
        filling.take(self.read(name, offset, filling.stop - offset))
        return filling.done

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, replacing the one of that name."""
        self._write(name, lambda: iter((content,)))

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file unless one of that name is seen."""
        if self.stat(name) is not None:
            return False
        self.put(name, content)
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
        sending = Sending(
            url=f"{self._url}/{name}",
            source=source,
            nbytes=nbytes,
            sha256=sha256,
            pace=pace,
            cancelled=Cancellation(cancelled),
            progress=progress,
        )
        parts = plan_parts(nbytes, self._options.part_nbytes, nbytes + 1)

        told: list[int] = []

        def contents() -> Iterator[bytes]:
            sending.tell(-sum(told))
            told.clear()
            for part in read_parts(sending, parts):
                sending.take(len(part.content))
                yield part.content
                sending.tell(len(part.content))
                told.append(len(part.content))

        self._write(name, contents, cancelled=sending.cancelled)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, also those that are not there."""
        for path in map(self._path, names):

            def remove(path: str = path) -> None:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(path)

            self._run("remove", path, remove)

    def abort_leftovers(self, prefix: str = "", older_than_s: float = 0.0) -> int:
        """Do nothing: fsspec does not tell what unfinished uploads there are."""
        return 0

    def check_conditions(self) -> bool:
        """Return False: fsspec promises no atomic condition."""
        return False

    def _write(
        self,
        name: str,
        contents: Callable[[], Iterator[bytes]],
        cancelled: Cancellation | None = None,
    ) -> None:
        """Write a file, read it back, and let it appear under its name.

        Under another name first, even where a rename is a copy: what fsspec closes
        after an error may be there, cut.
        """
        final = self._path(name)
        tmp = temporary_name(final, secrets.token_hex(4))
        self._run("make directory of", final, lambda: self._make_parent(final))
        try:
            self._run("write", tmp, lambda: self._try(tmp, contents), cancelled)
            self._run("rename", tmp, lambda: self._replace(tmp, final))
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(tmp)
            raise

    def _try(self, path: str, contents: Callable[[], Iterator[bytes]]) -> None:
        sent = hashlib.sha256()
        with self._fs.open(path, "wb") as file:
            for content in contents():
                sent.update(content)
                file.write(content)
        self._fs.invalidate_cache()
        found = hashlib.sha256()
        with self._fs.open(path, "rb") as file:
            while content := file.read(CHUNK_NBYTES):
                found.update(content)
        if found.digest() != sent.digest():
            self._fs.rm_file(path)
            raise OSError(errno.EIO, "other bytes arrived than were sent")

    def _replace(self, tmp: str, final: str) -> None:
        try:
            self._rename(tmp, final)
        except OSError:
            # SFTP, among others, renames to free names only.
            if not self._fs.exists(final):
                raise
            self._fs.rm_file(final)
            self._rename(tmp, final)

    def _rename(self, tmp: str, final: str) -> None:
        from fsspec import AbstractFileSystem

        if type(self._fs).mv is not AbstractFileSystem.mv:
            self._fs.mv(tmp, final)
            return
        # What is inherited copies and removes, and takes "?" and "*" for patterns.
        self._fs.cp_file(tmp, final)
        self._fs.rm_file(tmp)

    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _run(
        self,
        action: str,
        path: str,
        call: Callable[[], T],
        cancelled: Cancellation | None = None,
    ) -> T:
        place = self._url + path.removeprefix(self._root)
        self._fs.invalidate_cache()
        return self._retries.run(action, place, call, cancelled=cancelled)

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}"


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        file_system, root = fsspec.core.url_to_fs(url)
    except ValueError as error:
        message = f"cannot open {url}: {error}; stores are s3://, gs://, file:// and "
        raise StorageError(
            f"{message}what fsspec knows", errno=errno.EPROTONOSUPPORT, path=url
        ) from error
    return file_system, str(root).rstrip("/")


def _stored(name: str, known: dict[str, Any]) -> StoredFile:
    modified: Any = next((known[key] for key in _TIMES if known.get(key)), None)
    if hasattr(modified, "timestamp"):
        modified = modified.timestamp()
    return StoredFile(
        name=name,
        nbytes=int(known["size"]),
        modified_s=float(modified) if isinstance(modified, int | float) else None,
    )


def _explain(error: Exception) -> Failure:
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, FileNotFoundError):
        return Failure(errno=errno.ENOENT, reason=reason)
    if isinstance(error, PermissionError):
        return Failure(errno=errno.EACCES, reason=reason, advice=CHECK_CREDENTIALS)
    if isinstance(error, TimeoutError):
        return Failure(errno=errno.ETIMEDOUT, reason=reason, is_transient=True)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return Failure(errno=number, reason=reason)
    is_transient = isinstance(error, ConnectionError | OSError)
    return Failure(errno=errno.EIO, reason=reason, is_transient=is_transient)
