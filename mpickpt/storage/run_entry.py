"""Describes the checkpoints of a run, and what their sizes tell; reads only."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from mpickpt.errors import StorageError
from mpickpt.format.records import ShardManifest
from mpickpt.planning.retention import Candidate
from mpickpt.storage.contents import wrong_files
from mpickpt.storage.places import Place


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One published checkpoint of a run, with all that is said about it.

    Attributes
    ----------
    step : int
        The step that was saved.
    path : Path or RemotePath
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
    path: Place
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

        Looked at when it is asked for: one stat for each file, one listing of a store.
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
    path : Path or RemotePath
        Its directory.
    number : int
        Counts the rejections of the run; 0 where that is not known.
    reason : str
        Why it was set aside.
    is_pinned : bool
        Whether it was pinned before.
    """

    step: int
    path: Place
    number: int
    reason: str
    is_pinned: bool


class Run(Protocol):
    """The checkpoints of one run, in a directory or in a store."""

    @property
    def path(self) -> Place:
        """Where they are."""

    def candidates(self) -> list[RunEntry]:
        """Return the published checkpoints in order of step."""

    def rejected(self) -> list[RejectedEntry]:
        """Return the checkpoints that were set aside, the latest last."""

    def forget(self, step: int) -> None:
        """Remove what is said about a step whose checkpoint was removed."""

    def forget_rejected(self, entry: RejectedEntry) -> None:
        """Remove what is said about a rejected checkpoint that was removed."""


def size_problem(directory: Place, manifest: ShardManifest) -> str | None:
    """Tell which files are missing or have another size; None where none are."""
    wrong = wrong_files(directory, manifest)
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
