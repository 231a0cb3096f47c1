"""Finds checkpoints and reads their manifests; never MPI or HDF5.

In directories or in a store, whichever a path or URL says. Order is by step number,
never by time stamp: a copied or restored directory has whatever times the copy gave it.
"""

import operator
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import overload

from mpickpt.errors import IncompleteCheckpointError, StorageError
from mpickpt.format.manifest import MAX_MANIFEST_NBYTES, parse_manifest
from mpickpt.format.naming import MANIFEST_NAME, step_directory_name
from mpickpt.format.records import ShardManifest
from mpickpt.storage.contents import missing_shards, rubbish
from mpickpt.storage.found_instead import not_found
from mpickpt.storage.places import Place, PlaceLike, read_small_file
from mpickpt.storage.remote_path import RemotePath, parse_place
from mpickpt.storage.second_look import is_gone
from mpickpt.storage.small_file import names_in
from mpickpt.storage.step_directories import (
    CheckpointEntry,
    StepDirectory,
    StepPlace,
    checkpoints,
    step_directories,
    steps_at,
)

__all__ = [
    "CheckpointEntry",
    "PathLike",
    "StepDirectory",
    "StepPlace",
    "checkpoints",
    "is_new",
    "latest",
    "missing_shards",
    "read_manifest",
    "read_manifest_text",
    "rubbish",
    "step_directories",
    "step_path",
    "steps_at",
]

PathLike = str | os.PathLike[str]

_NEW_S = 5.0


def read_manifest(path: PlaceLike) -> ShardManifest:
    """Return the manifest of the checkpoint in a directory.

    Parameters
    ----------
    path : path-like or URL
        Directory of one checkpoint, or its URL in a store.

    Raises
    ------
    CheckpointNotFoundError
        If no checkpoint was published there; tells what is there instead.
    ManifestError
        If the manifest is damaged, of a newer schema, or breaks a rule.
    StorageError
        If the file system or the store refuses.

    Notes
    -----
    Not collective; needs no MPI. The shards are not looked at.
    """
    directory = parse_place(path)
    text = read_manifest_text(directory)
    return parse_manifest(text, where=str(directory / MANIFEST_NAME))


def read_manifest_text(path: PlaceLike) -> bytes:
    """Return the content of `manifest.json`, not verified yet.

    Raises
    ------
    CheckpointNotFoundError
        If no checkpoint was published there; tells what is there instead.
    StorageError
        If the file system refuses.
    """
    directory = parse_place(path)
    try:
        # One byte more than is allowed, so that `parse_manifest` refuses it.
        return read_small_file(directory / MANIFEST_NAME, MAX_MANIFEST_NBYTES + 1)
    except IncompleteCheckpointError as error:
        raise not_found(directory) from error
    except StorageError as error:
        if isinstance(directory, RemotePath) or not is_gone(error):
            raise
        if MANIFEST_NAME in names_in(directory):
            raise
        raise not_found(directory) from error


def latest(run_dir: PlaceLike) -> Place | None:
    """Return the directory of the published checkpoint of the highest step, if any.

    Parameters
    ----------
    run_dir : path-like or URL
        Directory that holds checkpoints, or its URL in a store.

    Returns
    -------
    Path, RemotePath or None
        A `RemotePath`, of which `str` gives the URL, in a store.

    Raises
    ------
    StorageError
        If the file system or the store refuses.
    """
    published = checkpoints(run_dir)
    return published[-1].path if published else None


@overload
def step_path(run_dir: Path, step: int) -> Path: ...


@overload
def step_path(run_dir: PlaceLike, step: int) -> Place: ...


def step_path(run_dir: PlaceLike, step: int) -> Place:
    """Return the directory in which the checkpoint of a step lies, or would lie.

    Parameters
    ----------
    run_dir : path-like or URL
        Directory that holds checkpoints, or its URL in a store.
    step : int
        Zero or more.
    """
    number = operator.index(step)
    if number < 0:
        raise ValueError(f"step {number}: steps are counted from 0")
    return parse_place(run_dir) / step_directory_name(number)


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
