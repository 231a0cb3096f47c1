"""Prepares files that other processes may be preparing too; one process, files only.

Several processes, on several nodes, may copy one shard to one place at once. Each
writes to a name of its own, which tells its machine, and holds a lock on it; so what a
killed one left is known on its machine at once, and elsewhere by its age.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mpickpt.errors import StorageError
from mpickpt.format.naming import (
    parse_temporary_name,
    parse_temporary_token,
    temporary_name,
)
from mpickpt.storage.commit import create_file

# Whoever writes slower than a block in ten minutes has its file taken, and fails.
ABANDONED_S = 600.0

_MACHINE_DIGITS = 4
_FIRST = "0000"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class HeldTemporary:
    """A file that is being prepared.

    Attributes
    ----------
    path : Path
        Where it is.
    descriptor : int
        Open for writing; whoever asked for it closes it.
    """

    path: Path
    descriptor: int


@contextlib.contextmanager
def held_temporary(final: Path) -> Iterator[HeldTemporary]:
    """Create the file that is going to get a final name, and hold it meanwhile.

    Parameters
    ----------
    final : Path
        The name that it gets in the body, by a rename or a link.

    Raises
    ------
    StorageError
        If it cannot be created.

    Notes
    -----
    What still has the temporary name when the body ends is removed. What this machine
    left there when it was killed is replaced.
    """
    held, lock = _create(final)
    try:
        yield held
    finally:
        _discard_own(held.path, lock)
        os.close(lock)


def discard_if_abandoned(path: Path, now_s: float) -> bool:
    """Remove a temporary file of a copier unless one is writing it; tell whether.

    Parameters
    ----------
    path : Path
        A name that `naming.temporary_name` built.
    now_s : float
        The time, as the file system tells it: that of a file just written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        token = parse_temporary_token(path.name) or ""
        is_old = os.fstat(descriptor).st_mtime < now_s - ABANDONED_S
        if not is_old and not (token.startswith(_machine()) and _locked(descriptor)):
            return False
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def is_temporary(path: Path) -> bool:
    """Tell whether a file is one that a copier was preparing, or still is."""
    return parse_temporary_name(path.name) is not None


def _create(final: Path) -> tuple[HeldTemporary, int]:
    """Return the file, and another descriptor of it that keeps the lock."""
    token = _machine() + _FIRST
    while True:
        path = final.with_name(temporary_name(final.name, token))
        try:
            descriptor = create_file(path)
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise
            # By its age no other machine can have it: the name tells this one.
            if not discard_if_abandoned(path, now_s=0.0):
                token = _machine() + secrets.token_hex(2)
            continue
        # A lock is the open file's; it ends with the last of its descriptors.
        lock = os.dup(descriptor)
        if _holds(descriptor, path):
            return HeldTemporary(path, descriptor), lock
        os.close(descriptor)
        os.close(lock)


def _holds(descriptor: int, path: Path) -> bool:
    """Lock a file just made; False if another process took it for abandoned."""
    try:
        _lock(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        return True  # no locks here: only its age tells others
    return _is_of(path, descriptor)


def _locked(descriptor: int) -> bool:
    """Take the lock of a file; False if a process holds it, or there are no locks."""
    try:
        _lock(descriptor)
    except OSError:
        return False
    return True


def _lock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _discard_own(path: Path, descriptor: int) -> None:
    # After a rename the name may already be another copier's.
    with contextlib.suppress(OSError):
        if _is_of(path, descriptor):
            path.unlink()


def _is_of(path: Path, descriptor: int) -> bool:
    try:
        named, found = os.lstat(path), os.fstat(descriptor)
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino)


@cache
def _machine() -> str:
    """Return digits that tell machines apart, within which locks are known to work."""
    try:
        name = _BOOT_ID.read_text().strip()
    except OSError:
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).hexdigest()[:_MACHINE_DIGITS]
