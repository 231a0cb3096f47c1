"""A store that is a directory of a file system; durable by `storage.commit`."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Event

from mpickpt.storage.commit import (
    close_file,
    make_directory,
    publish,
    rename,
    storage_errors,
    sync_directory,
    sync_file,
)
from mpickpt.storage.held_temporary import (
    HeldTemporary,
    discard_if_abandoned,
    held_temporary,
    is_temporary,
)
from mpickpt.storage.stores.failures import Cancellation, raise_if_cancelled
from mpickpt.storage.stores.names import checked_name, directory_prefix, probe_name
from mpickpt.storage.stores.parts import Sending, plan_parts, read_parts
from mpickpt.storage.stores.ranges import Filling
from mpickpt.storage.stores.store import (
    Names,
    Pace,
    Progress,
    StoredFile,
    StoreOptions,
)

_BLOCK_NBYTES = 8 << 20
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class DirectoryStore:
    """A `Store` in a directory, which need not exist yet.

    Parameters
    ----------
    path : Path
        The directory.
    options : StoreOptions, optional
        Without effect: a file system has time-outs of its own.

    Notes
    -----
    It keeps no digests: `stat` tells none. An upload that is cut begins again.
    """

    def __init__(self, path: Path, options: StoreOptions | None = None) -> None:
        self._path = path
        self._links: bool | None = None

    @property
    def url(self) -> str:
        """Where it is: the absolute path."""
        return str(self._path.absolute())

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Yield the files whose names begin with `prefix`."""
        directory = prefix.rpartition("/")[0]
        for path in _files_below(self._path / directory):
            name = path.relative_to(self._path).as_posix()
            if name.startswith(prefix) and not is_temporary(path):
                found = self.stat(name)
                if found is not None:
                    yield found

    def directories(self, prefix: str = "") -> Names:
        """Return the names of the directories right below one."""
        below = directory_prefix(prefix)
        names = (
            entry.name
            for entry in _entries(self._path / below)
            if entry.is_dir(follow_symlinks=False)
        )
        return sorted(f"{below}{name}" for name in names)

    def stat(self, name: str) -> StoredFile | None:
        """Return size and time of a file; None where there is none."""
        path = self._file(name)
        with storage_errors("look at", path):
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return StoredFile(name=name, nbytes=found.st_size, modified_s=found.st_mtime)

    def read(self, name: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return bytes of a file."""
        path = self._file(name)
        with storage_errors("read", path), open(path, "rb") as file:
            file.seek(offset)
            return file.read(-1 if nbytes is None else nbytes)

    def read_into(self, name: str, view: memoryview, offset: int = 0) -> int:
        """Fill `view` from a file and return the bytes read."""
        path, filling = self._file(name), Filling(view, offset)
        with storage_errors("read", path), open(path, "rb", buffering=0) as file:
            file.seek(offset)
            filling.take_from(lambda nbytes: file.read(nbytes) or b"")
        return filling.done

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, replacing the one of that name at once."""
        final = self._file(name)
        with self._prepared(final, lambda held: _write(held, content)) as tmp:
            publish(tmp, final)

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file unless there is one of that name."""
        final = self._file(name)
        with self._prepared(final, lambda held: _write(held, content)) as tmp:
            is_new = self._name_if_free(tmp, final)
        sync_directory(final.parent)
        return is_new

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
        final = self._file(name)
        sending = Sending(
            url=str(final),
            source=source,
            nbytes=nbytes,
            sha256=sha256,
            pace=pace,
            cancelled=Cancellation(cancelled),
            progress=progress,
        )
        parts = plan_parts(nbytes, _BLOCK_NBYTES, nbytes // _BLOCK_NBYTES + 1)

        def copy(held: HeldTemporary) -> None:
            for part in read_parts(sending, parts):
                raise_if_cancelled("copy to", sending.url, sending.cancelled)
                sending.take(len(part.content))
                _write(held, part.content)
                sending.tell(len(part.content))

        with self._prepared(final, copy) as tmp:
            publish(tmp, final)

    def delete(self, names: Iterable[str]) -> None:
        """Remove files, also those that are not there, and durably."""
        parents = set()
        for path in map(self._file, names):
            gone = (FileNotFoundError, NotADirectoryError)
            with storage_errors("remove", path), contextlib.suppress(*gone):
                path.unlink()
                parents.add(path.parent)
        for parent in parents:
            sync_directory(parent)

    def abort_leftovers(self, prefix: str = "", older_than_s: float = 0.0) -> int:
        """Remove what dead or idle writers have left, whatever the age asked for.

        Notes
        -----
        A writer that lives holds a lock; on another node only its age shows that it is
        dead, so `older_than_s` cannot shorten the ten minutes that it is given.
        """
        now_s = time.time()
        below = self._path / prefix.rpartition("/")[0]
        abandoned = [
            path
            for path in _files_below(below)
            if is_temporary(path)
            and path.relative_to(self._path).as_posix().startswith(prefix)
            and _age_s(path, now_s) >= older_than_s
        ]
        return sum(discard_if_abandoned(path, now_s) for path in abandoned)

    def check_conditions(self) -> bool:
        """Tell whether `put_new` is atomic here: where there are hard links."""
        if self._links is None:
            name = probe_name()
            self.put_new(name, b"")
            self.delete([name])
        return bool(self._links)

    def _file(self, name: str) -> Path:
        return self._path / checked_name(name)

    @contextlib.contextmanager
    def _prepared(
        self, final: Path, write: Callable[[HeldTemporary], None]
    ) -> Iterator[Path]:
        """Give the path of a durable file that is to become `final`."""
        make_directory(final.parent)
        with held_temporary(final) as held:
            try:
                write(held)
                sync_file(held.descriptor, held.path)
            finally:
                close_file(held.descriptor, held.path)
            yield held.path

    def _name_if_free(self, tmp: Path, final: Path) -> bool:
        # Unlike a rename, a hard link replaces nothing.
        with storage_errors(f"publish as {final.name}", tmp):
            try:
                os.link(tmp, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._links = False
            else:
                self._links = True
                return True
        if self.stat(final.relative_to(self._path).as_posix()) is not None:
            return False
        rename(tmp, final)
        return True


def _write(held: HeldTemporary, content: bytes) -> None:
    rest = memoryview(content)
    with storage_errors("write", held.path):
        while rest:
            rest = rest[os.write(held.descriptor, rest) :]


def _entries(directory: Path) -> Iterator["os.DirEntry[str]"]:
    with storage_errors("list", directory):
        try:
            with os.scandir(directory) as found:
                yield from sorted(found, key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return


def _files_below(directory: Path) -> Iterator[Path]:
    for entry in _entries(directory):
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _age_s(path: Path, now_s: float) -> float:
    try:
        return now_s - os.lstat(path).st_mtime
    except OSError:
        return 0.0
