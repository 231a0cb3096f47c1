"""Looks at what the disk of this node holds of a run; reads only, no MPI."""

import os
import stat
from pathlib import Path

from mpickpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from mpickpt.format.records import ShardManifest
from mpickpt.planning.sights import NodeSight, StepSight, is_listed
from mpickpt.storage.catalog import StepDirectory, read_manifest, step_directories
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.removal import own_files
from mpickpt.storage.run_directory import RunDirectory, other_step


def look_at_run(run: RunDirectory) -> NodeSight:
    """Return what lies in a run directory on a disk of this node.

    Notes
    -----
    A disk that refuses has nothing, for a reason that is told: what others have may
    do without it.
    """
    try:
        found = [one for one in step_directories(run.path) if not one.is_rejected]
    except StorageError as error:
        return NodeSight(problem=error.message)
    return NodeSight(steps=[_look_at_step(run, one) for one in found])


def _look_at_step(run: RunDirectory, found: StepDirectory) -> StepSight:
    try:
        return _seen_step(run, found)
    except StorageError as error:
        return StepSight(step=found.step, problem=error.message)


def _seen_step(run: RunDirectory, found: StepDirectory) -> StepSight:
    checkpoint_id, created_at, problem = None, "", ""
    if found.is_published:
        try:
            manifest = read_manifest(found.path)
        except CheckpointNotFoundError:
            pass  # removed meanwhile
        except CheckpointError as error:
            problem = error.message
        else:
            if manifest.step == found.step:
                checkpoint_id = manifest.checkpoint_id
                created_at = manifest.created_at
            else:
                problem = other_step(found.path, manifest.step)
    return StepSight(
        step=found.step,
        checkpoint_id=checkpoint_id,
        created_at=created_at,
        problem=problem,
        attempts=run.attempts(found.step),
        files=_files_in(found.path),
    )


def _files_in(directory: Path) -> dict[str, int]:
    files = {}
    for path in own_files(directory):
        relative = str(path.relative_to(directory))
        if is_listed(relative):
            with storage_errors("look at", path):
                try:
                    seen = os.lstat(path)
                except FileNotFoundError:
                    continue
            if stat.S_ISREG(seen.st_mode):
                files[relative] = seen.st_size
    return files


def ranks_here(directory: Path, manifest: ShardManifest) -> list[int]:
    """Return whose shards lie in a directory, of the sizes that they were saved with.

    Raises
    ------
    StorageError
        If the directory cannot be looked at.
    """
    files = _files_in(directory)
    return [s.rank for s in manifest.shards if files.get(s.path) == s.nbytes]
