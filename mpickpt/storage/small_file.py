"""Reads and replaces the small control files of a run; one process, no MPI."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpickpt.errors import IncompleteCheckpointError, StorageError
from mpickpt.format.naming import (
    CONTROL_DIRECTORY,
    parse_temporary_name,
    temporary_name,
)
from mpickpt.storage.commit import (
    discard,
    make_directory,
    publish,
    storage_errors,
    unlink_durably,
    write_new_file,
)
from mpickpt.storage.filesystem import is_symlink
from mpickpt.storage.second_look import is_gone, list_afresh
from mpickpt.storage.shard_file import is_no_file, open_shard_file

log = logging.getLogger(__name__)

_MAX_NBYTES = 1 << 20


def replace_file(path: Path, content: bytes) -> None:
    """Give a small file this content; readers see the old one or the new one.

    Raises
    ------
    StorageError
        If the file system refuses; the old content stays.

    Notes
    -----
    Durable when it returns. Several processes may do it: the last one wins.
    """
    make_control_directory(path.parent)
    tmp = path.with_name(temporary_name(path.name, secrets.token_hex(4)))
    write_new_file(tmp, content)
    try:
        publish(tmp, path)
    except BaseException:
        discard(tmp)
        raise


def content_of(path: Path) -> bytes | None:
    """Return what a small file holds, None where there is none.

    What is no regular file, or leads out of the run, is as good as none: that is
    logged.
    """
    if not is_in_run(path.parent):
        log.warning("%s is ignored: it lies behind a symbolic link", path)
        return None
    try:
        with open_shard_file(path, direct=False) as file:
            content = bytearray(min(file.nbytes, _MAX_NBYTES))
            file.read_at(memoryview(content), 0)
    except IncompleteCheckpointError:
        return None
    except StorageError as error:
        if not is_no_file(error):
            raise
        log.warning("%s is ignored: %s", path, error)
        return None
    return bytes(content)


def replace_document(path: Path, document: dict[str, Any]) -> None:
    """Replace a small file by a JSON object, durably.

    Raises
    ------
    ValueError, TypeError
        If JSON cannot hold it; NaN and infinity are none of JSON.
    StorageError
        If the file system refuses; the old content stays.
    """
    text = json.dumps(document, sort_keys=True, allow_nan=False, indent=1)
    replace_file(path, text.encode() + b"\n")


def document_of(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that a small file holds.

    None where there is none, and where it is damaged: that is logged, since no
    control file is worth stopping a run for.
    """
    content = content_of(path)
    if content is None:
        return None
    try:
        document = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        log.warning("%s is ignored: %s", path, error)
        return None
    if not isinstance(document, dict):
        log.warning("%s is ignored: not a JSON object", path)
        return None
    return document


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory; none where it does not exist."""
    try:
        return list_afresh(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        # It may be what lies above that could not be listed.
        with storage_errors("list", Path(error.filename or directory)):
            raise


def is_there(path: Path) -> bool:
    """Tell whether anything has this name, whatever this node remembers of it."""
    with storage_errors("look for", path):
        try:
            os.lstat(path)
        except OSError as error:
            if not is_gone(error):
                raise
        else:
            return True
    return path.name in names_in(path.parent)


def is_in_run(directory: Path) -> bool:
    """Tell whether a control directory and those above it, in the run, are real."""
    above = [directory, directory.parent]
    return not any(
        is_symlink(path)
        for path in above
        if CONTROL_DIRECTORY in (path.name, path.parent.name)
    )


def control_names_in(directory: Path) -> list[str]:
    """Return the names in a control directory; none where it leads out of the run."""
    if is_in_run(directory):
        return names_in(directory)
    log.warning("%s is ignored: it lies behind a symbolic link", directory)
    return []


def make_control_directory(directory: Path) -> None:
    """Make a control directory, durably, where it does not exist.

    Raises
    ------
    StorageError
        If it is a symbolic link, or the file system refuses: what is written and
        removed there must lie in the run.
    """
    if not is_in_run(directory):
        raise StorageError(
            f"{directory} lies behind a symbolic link, so nothing is written there; "
            "put a directory in its place",
            errno=errno.ELOOP,
            path=str(directory),
        )
    make_directory(directory)


def remove_control_file(path: Path) -> None:
    """Remove a control file, durably, where there is one."""
    # Behind a link that leads out of the run nothing is ours.
    if is_in_run(path.parent) and is_there(path):
        unlink_durably(path)


def discard_unfinished(directory: Path, until: float) -> None:
    """Remove files that a `replace_file` did not get to rename, as well as can be.

    Parameters
    ----------
    directory : Path
        A control directory.
    until : float
        Time of the file system; what was written later stays.
    """
    for name in control_names_in(directory):
        if parse_temporary_name(name) is not None:
            with contextlib.suppress(OSError):
                if (directory / name).lstat().st_mtime < until:
                    discard(directory / name)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time do the body, where the file system has locks."""
    make_control_directory(path.parent)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with storage_errors("open", path):
        descriptor = os.open(path, flags, 0o666)
    try:
        # Lustre without "-o flock" refuses: then the last writer wins.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):  # nothing was written in it
            os.close(descriptor)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
