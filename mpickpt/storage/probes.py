"""Tries out what a file system does, in a directory made for it; reports, judges not.

Every function takes a directory of its caller's own, leaves files in it for the caller
to remove, and raises OSError (StorageError among them) where the file system refuses
what is tried. No lock is waited for.
"""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from mpickpt.planning.probed import (
    GRANTED,
    DirectIoFound,
    LocksFound,
    RenamingFound,
)
from mpickpt.storage.commit import rename, sync_file, write_new_file
from mpickpt.storage.large_memory import allocate
from mpickpt.storage.latency import Often, series, touch
from mpickpt.storage.second_look import meet
from mpickpt.storage.shard_file import new_shard_file

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_OLD, _NEW = b"old", b"new"
# Linux stamps files by a clock that may be one tick behind.
_TICK_S = 0.01
_N_STAMPS = 3


def errno_name(number: int | None) -> str | None:
    """Return the name of an errno: "EIO"; its digits where it has none."""
    if number is None:
        return None
    return errno.errorcode.get(number, str(number))


def probe_renaming(directory: Path, often: Often) -> RenamingFound:
    """Rename files over one that is read, while its name is opened again and again."""
    final, tmp = directory / "renamed", directory / "renamed.new"
    write_new_file(final, _OLD)
    reader = os.open(final, os.O_RDONLY | os.O_CLOEXEC)
    try:

        def replace() -> float:
            touch(tmp, _NEW)
            begin = perf_counter()
            rename(tmp, final)
            return perf_counter() - begin

        alone = series(replace, often)
        with _opened_all_the_time(final) as opener:
            series(replace, often)
        return RenamingFound(
            replaces=final.read_bytes() == _NEW and not tmp.exists(),
            n_opened=opener.n_opened,
            n_failed=opener.n_failed,
            n_missed=opener.n_missed,
            keeps_readers=_reads(reader, _OLD),
            timing=alone,
        )
    finally:
        os.close(reader)


def probe_direct_io(directory: Path) -> DirectIoFound:
    """Write around the page cache, with the smallest alignment that is taken."""
    if not _O_DIRECT:
        return DirectIoFound(is_accepted=False)
    path, refusal = directory / "direct", errno.EINVAL
    buffer = allocate(_ALIGNMENTS[-1])
    with new_shard_file(path, nbytes=0, direct=False) as file:
        try:
            flags = fcntl.fcntl(file.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(file.descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
        except OSError as error:
            refusal = error.errno or refusal
            return DirectIoFound(is_accepted=False, errno=errno_name(refusal))
        for nbytes in _ALIGNMENTS:
            # An odd multiple of it, so that no larger alignment is what it has.
            if _takes(file.descriptor, buffer[:nbytes], nbytes):
                return DirectIoFound(is_accepted=True, alignment_nbytes=nbytes)
    return DirectIoFound(is_accepted=False, errno=errno_name(refusal))


def probe_locks(directory: Path) -> LocksFound:
    """Ask for both kinds of locks on files that nobody else knows."""
    # Network file systems turn one kind into the other, and then both exclude each
    # other on one file.
    return LocksFound(
        flock=_granted(directory / "flock", _try_flock),
        fcntl=_granted(directory / "fcntl", _try_fcntl),
    )


def hold_lock(path: Path) -> int:
    """Create a file and lock it; return its descriptor, for the caller to close."""
    touch(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _try_flock(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Tell whether somebody else holds a lock on a file, also one of another node."""
    meet(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _try_flock(descriptor)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def probe_exclusive(directory: Path) -> bool:
    """Tell whether creating a file that exists is refused where that is asked for."""
    path = directory / "exclusive"
    touch(path)
    try:
        touch(path)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
        return True
    return False


def probe_clock(directory: Path) -> float:
    """Return by how many seconds the file system's clock is ahead of this node's.

    Zero where the stamp of a file lies between the times before and after, or a tick
    beside them.
    """
    return min((_skew(directory / f"stamp{n}") for n in range(_N_STAMPS)), key=abs)


def append_durably(path: Path, content: bytes) -> None:
    """Write to the end of a file and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(descriptor, content)
        sync_file(descriptor, path)
    finally:
        os.close(descriptor)


def _skew(path: Path) -> float:
    before = time.time()
    touch(path, b"now")
    after = time.time()
    found = path.stat()
    # Some file systems keep whole seconds.
    tick_s = _TICK_S if found.st_mtime_ns % 10**9 else 1.0
    if found.st_mtime < before - tick_s:
        return found.st_mtime - before
    return max(0.0, found.st_mtime - after - tick_s)


class _Opener:
    """Opens a name in a thread until told to stop, and counts."""

    def __init__(self, path: Path) -> None:
        self.n_opened = 0
        self.n_failed = 0
        self.n_missed = 0
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop, having looked at least once."""
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        while not (self._stop.is_set() and self.n_opened):
            self.n_opened += 1
            try:
                os.close(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                # FUSE and NFS look a name up first and open the file next, which may
                # have gone by then. The name itself has to be there always.
                self.n_failed += 1
                self.n_missed += not _is_named(self._path)


@contextlib.contextmanager
def _opened_all_the_time(path: Path) -> Iterator[_Opener]:
    opener = _Opener(path)
    try:
        yield opener
    finally:
        opener.end()


def _is_named(path: Path) -> bool:
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno != errno.ENOENT
    return True


def _reads(descriptor: int, content: bytes) -> bool:
    try:
        return os.pread(descriptor, len(content), 0) == content
    except OSError:
        return False


def _takes(descriptor: int, view: memoryview, offset: int) -> bool:
    try:
        return os.pwrite(descriptor, view, offset) == len(view)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def _try_flock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _try_fcntl(descriptor: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _granted(path: Path, lock: Callable[[int], None]) -> str:
    touch(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        lock(descriptor)
    except OSError as error:
        return errno_name(error.errno) or str(error)
    finally:
        os.close(descriptor)
    return GRANTED
