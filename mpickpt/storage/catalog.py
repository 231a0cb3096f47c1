"""Finds checkpoints and reads their manifests; reads directories, never MPI or HDF5.

Order is by step number, never by time stamp: a copied or restored directory has
whatever times the copy gave it.
"""

import operator
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mpickpt.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
)
from mpickpt.format.manifest import MAX_MANIFEST_NBYTES, parse_manifest
from mpickpt.format.naming import (
    MANIFEST_NAME,
    is_own_file,
    parse_rejected_directory,
    parse_shard_name,
    parse_step_directory,
    receipts_name,
    shard_subdirectories,
    step_directory_name,
)
from mpickpt.format.records import ShardManifest
from mpickpt.storage.filesystem import is_directory
from mpickpt.storage.second_look import SecondLook, is_gone
from mpickpt.storage.shard_file import open_shard_file
from mpickpt.storage.small_file import is_there, names_in

PathLike = str | os.PathLike[str]

_MOST_NAMES = 5

_NEW_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One published checkpoint of a run.

    Attributes
    ----------
    step : int
        The step that was saved.
    path : Path
        Its directory.
    """

    step: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDirectory:
    """One directory of a run that is named after a step, whatever it holds.

    Attributes
    ----------
    step : int
        The step in its name.
    path : Path
        The directory.
    is_published : bool
        Whether it has a manifest.
    is_rejected : bool
        Whether it was set aside, as damaged or left behind by a rewind.
    """

    step: int
    path: Path
    is_published: bool
    is_rejected: bool


def read_manifest(path: PathLike) -> ShardManifest:
    """Return the manifest of the checkpoint in a directory.

    Parameters
    ----------
    path : path-like
        Directory of one checkpoint.

    Raises
    ------
    CheckpointNotFoundError
        If no checkpoint was published there; tells what is there instead.
    ManifestError
        If the manifest is damaged, of a newer schema, or breaks a rule.
    StorageError
        If the file system refuses.

    Notes
    -----
    Not collective; needs no MPI. The shards are not looked at.
    """
    manifest_path = Path(path) / MANIFEST_NAME
    return parse_manifest(read_manifest_text(path), where=str(manifest_path))


def read_manifest_text(path: PathLike) -> bytes:
    """Return the content of `manifest.json`, not verified yet.

    Raises
    ------
    CheckpointNotFoundError
        If no checkpoint was published there; tells what is there instead.
    StorageError
        If the file system refuses.
    """
    directory = Path(path)
    manifest_path = directory / MANIFEST_NAME
    look = SecondLook(manifest_path)
    while True:
        try:
            return _content_of(manifest_path)
        except IncompleteCheckpointError as error:
            raise _not_found(directory) from error
        except StorageError as error:
            # A server forgot its handle; another save may have replaced the file.
            if look.helps(error):
                continue
            if is_gone(error) and MANIFEST_NAME not in names_in(directory):
                raise _not_found(directory) from error
            raise


def checkpoints(run_dir: PathLike) -> tuple[CheckpointEntry, ...]:
    """Return the published checkpoints of a run, the lowest step first.

    Parameters
    ----------
    run_dir : path-like
        Directory that holds checkpoints; one that does not exist has none.

    Raises
    ------
    StorageError
        If the file system refuses.

    Notes
    -----
    Not collective; needs no MPI. Manifests are not opened.
    """
    return tuple(
        CheckpointEntry(step=found.step, path=found.path)
        for found in step_directories(run_dir)
        if found.is_published and not found.is_rejected
    )


def latest(run_dir: PathLike) -> Path | None:
    """Return the directory of the published checkpoint of the highest step, if any.

    Parameters
    ----------
    run_dir : path-like
        Directory that holds checkpoints.

    Raises
    ------
    StorageError
        If the file system refuses.
    """
    published = checkpoints(run_dir)
    return published[-1].path if published else None


def step_path(run_dir: PathLike, step: int) -> Path:
    """Return the directory in which the checkpoint of a step lies, or would lie.

    Parameters
    ----------
    run_dir : path-like
        Directory that holds checkpoints.
    step : int
        Zero or more.
    """
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"step {number}: steps are counted from 0")
    return Path(run_dir) / step_directory_name(number)


def step_directories(run_dir: PathLike) -> tuple[StepDirectory, ...]:
    """Return every directory of a run that is named after a step, in order of step.

    Also those of saves that were never published, and those that were set aside.
    """
    found = []
    for name in names_in(Path(run_dir)):
        rejected = parse_rejected_directory(name)
        step = rejected[0] if rejected else parse_step_directory(name)
        directory = Path(run_dir) / name
        if step is not None and is_directory(directory):
            found.append(
                StepDirectory(
                    step=step,
                    path=directory,
                    is_published=is_there(directory / MANIFEST_NAME),
                    is_rejected=rejected is not None,
                )
            )
    return tuple(sorted(found, key=lambda one: (one.step, one.path.name)))


def is_new(manifest: ShardManifest) -> bool:
    """Tell whether a checkpoint was published a moment ago, as far as clocks agree.

    Its files may not be seen on every node yet.
    """
    try:
        created = datetime.fromisoformat(manifest.created_at)
        age = datetime.now(UTC) - created
    except (ValueError, TypeError):
        return False  # of another writer, or without a time zone
    return abs(age.total_seconds()) < _NEW_S


def missing_shards(directory: PathLike, manifest: ShardManifest) -> list[str]:
    """Return the paths of shards that are not there, by listing names alone."""
    present = _relative_names(Path(directory), manifest.world_size)
    return [shard.path for shard in manifest.shards if shard.path not in present]


def rubbish(directory: PathLike, manifest: ShardManifest) -> list[str]:
    """Return the files that a crashed or replaced save left beside a checkpoint.

    Only names that the library builds; files of others are no business of ours.
    """
    used = {shard.path for shard in manifest.shards} | {MANIFEST_NAME}
    used.add(receipts_name(manifest.checkpoint_id))
    if manifest.layout is not None:
        used.add(manifest.layout.path)
    names = _relative_names(Path(directory), manifest.world_size)
    return sorted(name for name in names - used if is_own_file(name.rpartition("/")[2]))


def _content_of(manifest_path: Path) -> bytes:
    with open_shard_file(manifest_path, direct=False) as file:
        # One byte more than is allowed, so that `parse_manifest` refuses it.
        content = bytearray(min(file.nbytes, MAX_MANIFEST_NBYTES + 1))
        file.read_at(memoryview(content), 0)
    return bytes(content)


def _relative_names(directory: Path, world_size: int) -> set[str]:
    names = set(names_in(directory))
    for inner in names.intersection(shard_subdirectories(world_size)):
        names.update(f"{inner}/{name}" for name in names_in(directory / inner))
    return names


def _not_found(directory: Path) -> CheckpointNotFoundError:
    absolute = directory.absolute()
    return CheckpointNotFoundError(
        f"no checkpoint at {absolute}: {_found_instead(absolute)}"
    )


def _found_instead(directory: Path) -> str:
    if not is_there(directory):
        parents = (parent for parent in directory.parents if is_directory(parent))
        return f"it does not exist; {next(parents, '/')} does"
    published = checkpoints(directory)
    if published:
        return (
            f"it is a run directory that holds {len(published)}; the latest is "
            f"{published[-1].path}"
        )
    names = sorted(names_in(directory))
    n_shards = sum(parse_shard_name(name) is not None for name in names)
    if n_shards:
        return (
            f"it holds {n_shards} shards but no {MANIFEST_NAME}: a save that was not "
            "published, running or interrupted"
        )
    if not names:
        return "the directory is empty"
    more = ", …" if len(names) > _MOST_NAMES else ""
    return f"the directory holds {', '.join(names[:_MOST_NAMES])}{more}"
