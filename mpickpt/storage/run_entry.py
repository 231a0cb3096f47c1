"""Describes the checkpoints of a run, and what their sizes tell; reads only."""

import os
import stat
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mpickpt.errors import IncompleteCheckpointError, StorageError
from mpickpt.format.records import LayoutRecord, ShardManifest, ShardRecord
from mpickpt.planning.retention import Candidate
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.second_look import is_gone
from mpickpt.storage.shard_file import is_no_file, open_shard_file


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One published checkpoint of a run, with all that is said about it.

    Attributes
    ----------
    step : int
        The step that was saved.
    path : Path
        Its directory.
    manifest : ShardManifest or None
        None where it cannot be read.
    metrics : dict
        Those of the manifest, updated by those that came later.
    is_pinned : bool
        Whether it must stay. A symbolic link counts as pinned: what it leads to is
        not the run's to remove.
    manifest_problem : str or None
        Why the manifest cannot be read.
    """

    step: int
    path: Path
    manifest: ShardManifest | None
    metrics: dict[str, Any]
    is_pinned: bool
    manifest_problem: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together, 0 where that is not known."""
        return 0 if self.manifest is None else self.manifest.nbytes

    @property
    def checkpoint_id(self) -> str | None:
        """Id of the save; None where the manifest is damaged."""
        return self.manifest.checkpoint_id if self.manifest else None

    @property
    def created_at(self) -> str | None:
        """When it was saved, as the manifest says."""
        return None if self.manifest is None else self.manifest.created_at

    @cached_property
    def problem(self) -> str | None:
        """What is wrong with it, as far as sizes tell; None where nothing is.

        Looked at when it is asked for: one stat for each file.
        """
        if self.manifest is None:
            return self.manifest_problem
        try:
            return size_problem(self.path, self.manifest)
        except StorageError as error:
            return str(error)

    @property
    def is_whole(self) -> bool:
        """Whether all files are there and have their sizes."""
        return self.problem is None


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedEntry:
    """One checkpoint that was set aside.

    Attributes
    ----------
    step : int
        The step that was saved.
    path : Path
        Its directory.
    number : int
        Counts the rejections of the run; 0 where that is not known.
    reason : str
        Why it was set aside.
    is_pinned : bool
        Whether it was pinned before.
    """

    step: int
    path: Path
    number: int
    reason: str
    is_pinned: bool


def size_problem(directory: Path, manifest: ShardManifest) -> str | None:
    """Tell which files are missing or have another size; None where none are."""
    wrong = [shard.path for shard in manifest.shards if not _has_size(directory, shard)]
    layout = manifest.layout
    if layout is not None and not _has_size(directory, layout):
        wrong.append(layout.path)
    if not wrong:
        return None
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]}{more}: missing, or of another size than was saved"


def retention_candidates(
    entries: Iterable[RunEntry], known_good: Container[int] | None = None
) -> list[Candidate]:
    """Return what the rules of retention need to know.

    Parameters
    ----------
    entries : iterable of RunEntry
        The published checkpoints of a run.
    known_good : container of int, optional
        Steps that this run agreed, loaded or verified; without it every checkpoint
        whose sizes are right passes for good.
    """
    return [
        Candidate(
            step=entry.step,
            is_pinned=entry.is_pinned,
            is_good=(known_good is None or entry.step in known_good) and entry.is_whole,
            metrics=entry.metrics,
            nbytes=entry.nbytes,
        )
        for entry in entries
    ]


def _has_size(directory: Path, record: ShardRecord | LayoutRecord) -> bool:
    path = directory / record.path
    with storage_errors("look at", path):
        try:
            found = os.lstat(path)
        except NotADirectoryError:
            return False
        except OSError as error:
            if not is_gone(error):
                raise
        else:
            if stat.S_ISREG(found.st_mode) and found.st_size == record.nbytes:
                return True
    return _has_size_when_opened(path, record.nbytes)


def _has_size_when_opened(path: Path, nbytes: int) -> bool:
    # A node may remember a size, or that the name was absent; to open asks the server.
    try:
        with open_shard_file(path, nbytes=nbytes, direct=False):
            return True
    except IncompleteCheckpointError:
        return False
    except StorageError as error:
        if is_no_file(error):
            return False
        raise
