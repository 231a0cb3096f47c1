"""Reads and replaces the small control files of a run; one process, no MPI."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpickpt.format.naming import temporary_name
from mpickpt.storage.commit import (
    discard,
    make_directory,
    publish,
    storage_errors,
    write_new_file,
)

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
    make_directory(path.parent)
    tmp = path.with_name(temporary_name(path.name, secrets.token_hex(4)))
    write_new_file(tmp, content)
    try:
        publish(tmp, path)
    except BaseException:
        discard(tmp)
        raise


def content_of(path: Path) -> bytes | None:
    """Return what a small file holds, None where there is none."""
    with storage_errors("read", path):
        try:
            with open(path, "rb") as file:
                return file.read(_MAX_NBYTES)
        except FileNotFoundError:
            return None


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
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        log.warning("%s is ignored: %s", path, error)
        return None
    if not isinstance(document, dict):
        log.warning("%s is ignored: not a JSON object", path)
        return None
    return document


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory; none where it does not exist."""
    with storage_errors("list", directory):
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time do the body, where the file system has locks."""
    make_directory(path.parent)
    with storage_errors("open", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Lustre without "-o flock" refuses: then the last writer wins.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
