"""Tells copies that are under way from what is left of dead ones; no MPI.

Where a checkpoint is copied to there is no manifest yet, as after a crashed save, but a
mark. Such a directory is worth keeping for a while: the next copy goes on with it.
"""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpickpt.errors import CheckpointError
from mpickpt.format.naming import (
    MANIFEST_NAME,
    copy_mark_name,
    is_own_file,
    parse_copy_mark_name,
    parse_shard_name,
)
from mpickpt.storage.contents import own_files
from mpickpt.storage.places import Place, read_small_file
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.removal import remove_directory_if_empty, remove_files
from mpickpt.storage.small_file import names_in
from mpickpt.storage.step_directories import StepPlace, steps_at

log = logging.getLogger(__name__)

# Longer than a target that does not answer, or a queue before the job that goes on.
STALE_S = 6 * 3600.0

_MOST_MARK_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCopy:
    """What has been copied of a checkpoint that is not published yet.

    Attributes
    ----------
    nbytes_there : int
        Bytes of whole shards.
    nbytes : int or None
        Bytes of all shards; None where that is not known.
    modified_s : float
        When something was last written there, by the clock of the file system.
    """

    nbytes_there: int
    nbytes: int | None
    modified_s: float

    @property
    def fraction(self) -> float | None:
        """How much of the shards is there; None where that is not known."""
        return self.nbytes_there / self.nbytes if self.nbytes else None


def partial_copy(directory: Place) -> PartialCopy | None:
    """Return how far a copy into a directory has come; None where there is none.

    Raises
    ------
    StorageError
        If the directory cannot be listed.
    """
    files = {name: (nbytes, time_s) for name, nbytes, time_s in _files_in(directory)}
    ids = {id8 for name in files if (id8 := parse_copy_mark_name(name)) is not None}
    if not ids or MANIFEST_NAME in files:
        return None
    nbytes_there = 0
    for name, (nbytes, _) in files.items():
        shard = parse_shard_name(name.rpartition("/")[2])
        if shard is not None and not shard.is_temporary and shard.id8 in ids:
            nbytes_there += nbytes
    return PartialCopy(
        nbytes_there=nbytes_there,
        nbytes=_nbytes_in(directory / copy_mark_name(min(ids))),
        modified_s=max(time_s for _, time_s in files.values()),
    )


def last_change(directory: Place) -> float:
    """Return when something was last written into a partial copy; 0 if nothing tells.

    Only to be compared with another answer.
    """
    copy = partial_copy(directory)
    return copy.modified_s if copy else 0.0


def is_copied_to(directory: Path, now_s: float) -> bool:
    """Tell whether a copy into a directory is under way, or may be gone on with.

    Parameters
    ----------
    directory : Path
        Of a checkpoint that is not published.
    now_s : float
        The time, as the file system tells it.
    """
    copy = partial_copy(directory)
    return copy is not None and copy.modified_s > now_s - STALE_S


def sweep_copies(run: Place) -> None:
    """Remove what is left of copies into a run that nobody has gone on with for hours.

    Notes
    -----
    Any process may do it. What is refused is logged. Times are compared with the
    newest in the run alone, so a clock that is wrong does no harm.
    """
    copies, newest_s = {}, 0.0
    try:
        for found in steps_at(run):
            newest_s = max(newest_s, _published_s(found))
            is_partial = not (found.is_published or found.is_rejected)
            if is_partial and (copy := partial_copy(found.path)) is not None:
                copies[found.path] = copy
                newest_s = max(newest_s, copy.modified_s)
        for directory, copy in copies.items():
            if copy.modified_s <= newest_s - STALE_S:
                _remove(directory)
    except CheckpointError as error:
        log.warning("%s was not swept: %s", run, error)


def _remove(directory: Place) -> None:
    if isinstance(directory, RemotePath):
        names = [name for name, _, _ in _files_in(directory)]
        if MANIFEST_NAME not in names:
            directory.store.abort_leftovers()
            directory.store.delete(names)
        return
    files = own_files(directory)
    if MANIFEST_NAME not in names_in(directory):
        remove_files(files)
        remove_directory_if_empty(directory)


def _files_in(directory: Place) -> Iterator[tuple[str, int, float]]:
    """Yield name, size and time of the library's files, and of the manifest."""
    if isinstance(directory, RemotePath):
        for file in directory.store.list():
            if file.name == MANIFEST_NAME or is_own_file(file.name.rpartition("/")[2]):
                yield file.name, file.nbytes, file.modified_s or 0.0
        return
    for path in [*own_files(directory), directory / MANIFEST_NAME]:
        try:
            found = os.lstat(path)
        except OSError:
            continue  # renamed or removed since, or never there
        yield str(path.relative_to(directory)), found.st_size, found.st_mtime


def _published_s(found: StepPlace) -> float:
    """Return when a checkpoint was published; 0 where it is not, or nothing tells."""
    if not found.is_published:
        return 0.0
    if isinstance(found.path, RemotePath):
        file = found.path.store.stat(MANIFEST_NAME)
        return (file and file.modified_s) or 0.0
    try:
        return os.lstat(found.path / MANIFEST_NAME).st_mtime
    except OSError:
        return 0.0


def _nbytes_in(mark: Place) -> int | None:
    """Return the size of the whole checkpoint, as the mark tells."""
    try:
        document = json.loads(read_small_file(mark, _MOST_MARK_NBYTES))
        nbytes = document.get("nbytes")
    except (CheckpointError, ValueError, RecursionError, AttributeError):
        return None
    return nbytes if type(nbytes) is int else None
