"""Sees the checkpoints of a run that are kept in a store; reads only, no MPI.

A store keeps checkpoints and nothing about them: no lease, no pins, no halt file, no
metrics but those of the manifests. All that is in the run directory of the job.
"""

from dataclasses import dataclass

from mpickpt.errors import CheckpointError, IncompleteCheckpointError, StorageError
from mpickpt.format.manifest import MAX_MANIFEST_NBYTES, parse_manifest
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.format.records import ShardManifest
from mpickpt.storage.places import Place, PlaceLike, each, read_small_file
from mpickpt.storage.remote_path import RemotePath, parse_place
from mpickpt.storage.run_directory import RunDirectory, other_step
from mpickpt.storage.run_entry import RejectedEntry, Run, RunEntry, size_problem
from mpickpt.storage.step_directories import NamedStep, named_steps


def run_at(place: PlaceLike) -> Run:
    """Return the run in a directory or a store; it need not exist."""
    path = parse_place(place)
    return RemoteRun(path) if isinstance(path, RemotePath) else RunDirectory(path)


class RemoteRun:
    """The checkpoints of one run in a store.

    Parameters
    ----------
    path : RemotePath
        Where they are.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path

    @property
    def path(self) -> Place:
        """Where they are."""
        return self._path

    def candidates(self) -> list[RunEntry]:
        """Return the published checkpoints in order of step.

        Raises
        ------
        StorageError
            If the store refuses.
        """
        found = [one for one in named_steps(self._path) if not one.is_rejected]
        entries = each(_entry, found, within=self._path)
        return [entry for entry in entries if entry is not None]

    def rejected(self) -> list[RejectedEntry]:
        """Return the checkpoints that were set aside before they were copied."""
        return [
            RejectedEntry(
                step=found.step, path=found.path, number=0, reason="", is_pinned=False
            )
            for found in named_steps(self._path)
            if found.is_rejected
        ]

    def forget(self, step: int) -> None:
        """Do nothing: a store says nothing about a step."""

    def forget_rejected(self, entry: RejectedEntry) -> None:
        """Do nothing: a store says nothing about a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _StoredEntry(RunEntry):
    """A checkpoint whose sizes were looked at when it was listed."""

    size_problem: str | None

    @property
    def problem(self) -> str | None:
        """What is wrong with it, as far as sizes tell; None where nothing is."""
        return self.manifest_problem or self.size_problem


def _entry(found: NamedStep) -> RunEntry | None:
    """Return what is said about a step; None where no manifest is."""
    manifest, problem = None, None
    where = found.path / MANIFEST_NAME
    try:
        text = read_small_file(where, MAX_MANIFEST_NBYTES + 1)
        manifest = parse_manifest(text, where=str(where))
    except IncompleteCheckpointError:
        return None  # not published, or removed since it was listed
    except CheckpointError as error:
        problem = str(error)
    if manifest is not None and manifest.step != found.step:
        problem, manifest = other_step(found.path, manifest.step), None
    return _StoredEntry(
        step=found.step,
        path=found.path,
        manifest=manifest,
        metrics=manifest.metrics if manifest else {},
        is_pinned=False,
        manifest_problem=problem,
        size_problem=_size_problem(found.path, manifest),
    )


def _size_problem(directory: Place, manifest: ShardManifest | None) -> str | None:
    try:
        return None if manifest is None else size_problem(directory, manifest)
    except StorageError as error:
        return str(error)
