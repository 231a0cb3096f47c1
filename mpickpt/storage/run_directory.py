"""Keeps what may change about checkpoints after publishing; files only, no MPI.

Control files lie under `.mpickpt/` in the run directory. Each is small, replaced as a
whole and durable, and these are about one checkpoint: pins, metrics that came later,
attempts to restore, why one was rejected.
"""

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpickpt.format.naming import (
    ATTEMPTS_DIRECTORY,
    METRICS_DIRECTORY,
    PINS_DIRECTORY,
    REJECTIONS_DIRECTORY,
    document_name,
    parse_document_name,
    parse_step_directory,
    rejected_directory_name,
    step_directory_name,
)
from mpickpt.format.records import INT_MAX, ShardManifest
from mpickpt.storage.catalog import (
    PathLike,
    checkpoints,
    read_manifest,
    step_directories,
    step_path,
)
from mpickpt.storage.commit import rename_durably
from mpickpt.storage.filesystem import is_symlink
from mpickpt.storage.manifest_cache import ManifestCache
from mpickpt.storage.places import local_path
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.run_entry import RejectedEntry, RunEntry
from mpickpt.storage.small_file import (
    control_names_in,
    document_of,
    is_there,
    locked,
    remove_control_file,
    replace_document,
    replace_file,
)

__all__ = ["RejectedEntry", "RunDirectory", "RunEntry", "set_metrics"]


class RunDirectory:
    """The control files about the checkpoints of one run.

    Parameters
    ----------
    path : path-like
        The run directory; it need not exist.

    Notes
    -----
    Not collective, needs no MPI. Every change is durable when its call returns. Any
    process may make them, except `reject`, which is for the holder of the lease.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self._manifests = ManifestCache()

    def candidates(self) -> list[RunEntry]:
        """Return the published checkpoints in order of step.

        Raises
        ------
        StorageError
            If the directory cannot be listed.
        """
        pinned = set(control_names_in(self.path / PINS_DIRECTORY))
        measured = set(control_names_in(self.path / METRICS_DIRECTORY))
        entries = []
        found = [(one.step, one.path.name) for one in checkpoints(self.path)]
        published = [(step, self.path / name) for step, name in found]
        self._manifests.forget_others([path for _, path in published])
        for step, path in published:
            manifest, problem = self._manifests.look_up(path)
            if manifest is None and problem is None:
                continue  # removed since it was listed
            if manifest is not None and manifest.step != step:
                problem = other_step(path, manifest.step)
                manifest = None
            is_measured = document_name(path.name) in measured
            later = self._later_metrics(step, manifest) if is_measured else {}
            entries.append(
                RunEntry(
                    step=step,
                    path=path,
                    manifest=manifest,
                    metrics=(manifest.metrics if manifest else {}) | later,
                    is_pinned=path.name in pinned or is_symlink(path),
                    manifest_problem=problem,
                )
            )
        return entries

    def pin(self, step: int) -> None:
        """Make the checkpoint of a step stay whatever the rules say.

        Raises
        ------
        CheckpointNotFoundError
            If none of that step is published.
        """
        read_manifest(step_path(self.path, step))
        replace_file(self._pin(step_directory_name(step)), b"")

    def unpin(self, step: int) -> None:
        """Let the rules decide about a step again."""
        remove_control_file(self._pin(step_directory_name(step)))

    def pins(self) -> list[int]:
        """Return the pinned steps in order."""
        names = control_names_in(self.path / PINS_DIRECTORY)
        steps = map(parse_step_directory, names)
        return sorted(step for step in steps if step is not None)

    def set_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Say by what a checkpoint is measured; see `mpickpt.set_metrics`."""
        manifest = read_manifest(step_path(self.path, step))
        path = self._document(METRICS_DIRECTORY, step)
        with locked(self.path / METRICS_DIRECTORY / "lock"):
            later = self._later_metrics(step, manifest)
            document = {
                "checkpoint_id": manifest.checkpoint_id,
                "metrics": later | {str(k): _plain(v) for k, v in metrics.items()},
            }
            replace_document(path, document)

    def attempts(self, step: int) -> int:
        """Return how often a restore of the step was begun without progress since."""
        document = document_of(self._document(ATTEMPTS_DIRECTORY, step)) or {}
        return _count(document.get("attempts"))

    def note_attempt(self, step: int) -> int:
        """Count one more attempt to restore a step and return how many it makes."""
        count = self.attempts(step) + 1
        path = self._document(ATTEMPTS_DIRECTORY, step)
        replace_document(path, {"attempts": count})
        return count

    def take_back_attempt(self, step: int) -> None:
        """Count one attempt to restore a step less."""
        path = self._document(ATTEMPTS_DIRECTORY, step)
        count = self.attempts(step) - 1
        if count > 0:
            replace_document(path, {"attempts": count})
        else:
            remove_control_file(path)

    def clear_attempts(self) -> None:
        """Forget all attempts: the run made progress."""
        for name in control_names_in(self.path / ATTEMPTS_DIRECTORY):
            if parse_document_name(name) is not None:
                remove_control_file(self.path / ATTEMPTS_DIRECTORY / name)

    def forget_rejected(self, entry: RejectedEntry) -> None:
        """Remove what is said about a rejected checkpoint that was removed."""
        remove_control_file(self._rejection(entry.path.name))
        remove_control_file(self._pin(entry.path.name))

    def forget(self, step: int) -> None:
        """Remove what is said about a step whose checkpoint was removed."""
        for directory in (METRICS_DIRECTORY, ATTEMPTS_DIRECTORY):
            remove_control_file(self._document(directory, step))
        self.unpin(step)

    def reject(self, step: int, reason: str) -> Path:
        """Set the checkpoint of a step aside and return its new directory.

        Parameters
        ----------
        step : int
            A published step; afterwards it can be saved again.
        reason : str
            For a person who wonders.

        Notes
        -----
        A pin goes with it. The reason is durable before the rename is.
        """
        source = step_path(self.path, step)
        target = self._free_rejected_path(source, step)
        number = 1 + max((entry.number for entry in self.rejected()), default=0)
        replace_document(
            self._rejection(target.name),
            {"number": number, "reason": reason, "at": _now()},
        )
        if step in self.pins():
            replace_file(self._pin(target.name), b"")
        remove_control_file(self._document(ATTEMPTS_DIRECTORY, step))
        rename_durably(source, target)
        self.forget(step)
        return target

    def rejected(self) -> list[RejectedEntry]:
        """Return the checkpoints that were set aside, the latest last."""
        pinned = set(control_names_in(self.path / PINS_DIRECTORY))
        entries = []
        for found in step_directories(self.path):
            if found.is_rejected:
                name = found.path.name
                document = document_of(self._rejection(name)) or {}
                entries.append(
                    RejectedEntry(
                        step=found.step,
                        path=found.path,
                        number=_count(document.get("number")),
                        reason=str(document.get("reason", "")),
                        is_pinned=name in pinned or is_symlink(found.path),
                    )
                )
        return sorted(entries, key=lambda entry: (entry.number, entry.step))

    def _later_metrics(
        self, step: int, manifest: ShardManifest | None
    ) -> dict[str, Any]:
        document = document_of(self._document(METRICS_DIRECTORY, step)) or {}
        # A step that was saved again is not what was measured then.
        if manifest and document.get("checkpoint_id") != manifest.checkpoint_id:
            return {}
        metrics = document.get("metrics")
        return metrics if isinstance(metrics, dict) else {}

    def _free_rejected_path(self, source: Path, step: int) -> Path:
        manifest, _ = self._manifests.look_up(source)
        id8 = manifest.id8 if manifest else secrets.token_hex(4)
        while True:
            target = self.path / rejected_directory_name(step, id8)
            if not is_there(target):
                return target
            id8 = secrets.token_hex(4)

    def _pin(self, directory_name: str) -> Path:
        return self.path / PINS_DIRECTORY / directory_name

    def _rejection(self, directory_name: str) -> Path:
        return self.path / REJECTIONS_DIRECTORY / document_name(directory_name)

    def _document(self, directory: str, step: int) -> Path:
        return self.path / directory / document_name(step_directory_name(step))


def other_step(path: Path | RemotePath, step: int) -> str:
    """Return what is wrong with a checkpoint in the directory of another step."""
    return f"{path} holds the checkpoint of step {step}: it was copied or renamed"


def set_metrics(run_dir: PathLike, step: int, metrics: Mapping[str, Any]) -> None:
    """Say by what a published checkpoint is measured, for `KeepBest` and `ls`.

    Parameters
    ----------
    run_dir : path-like
        Directory that holds the checkpoints.
    step : int
        The step whose checkpoint was evaluated.
    metrics : mapping of str
        JSON values or numpy scalars; they join, and replace, those that are there.

    Raises
    ------
    CheckpointNotFoundError
        If no checkpoint of that step is published.
    ValueError, TypeError
        If JSON cannot hold a value; NaN and infinity are none of JSON.
    StorageError
        If the file system refuses.

    Notes
    -----
    Not collective, needs no MPI. Several processes may do it at the same time.
    Durable when it returns.
    """
    why = "metrics that come later are kept in the run directory of the job"
    RunDirectory(local_path(run_dir, why)).set_metrics(step, metrics)


def _plain(value: Any) -> Any:
    # numpy scalars, without a need for numpy here.
    return value.item() if hasattr(value, "item") else value


def _count(value: Any) -> int:
    """Return a number of a control file; 0 for what none of ours would hold."""
    return value if type(value) is int and 0 <= value <= INT_MAX else 0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
