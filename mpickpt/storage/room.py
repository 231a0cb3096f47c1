"""Makes the directories where a save is going to write; files only, no MPI.

The root makes them and looks for space; every rank enters them before it writes.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mpickpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
)
from mpickpt.format.naming import parse_shard_name, shard_subdirectories
from mpickpt.storage.catalog import read_manifest
from mpickpt.storage.commit import make_directory, storage_errors
from mpickpt.storage.filesystem import free_nbytes
from mpickpt.storage.removal import own_files
from mpickpt.storage.second_look import meet, outlast
from mpickpt.storage.sweep import sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Where a save writes: its id, and the inode number of the directory."""

    save_id: str
    inode: int


def make_room(
    directory: Path,
    *,
    world_size: int,
    nbytes: int,
    overwrite: bool,
    claim: Callable[[], None],
    make_space: Callable[[int], None],
) -> Room:
    """Make the directories of a checkpoint, where a save is going to write.

    Parameters
    ----------
    directory : Path
        Of the checkpoint.
    world_size : int
        Number of shards to come.
    nbytes : int
        Bytes to come.
    overwrite : bool
        Whether a published checkpoint may stand there already.
    claim : callable
        Called once the directory is there, before anything in it is removed; raises
        if others save there too.
    make_space : callable of int
        May remove older checkpoints, so that as many bytes are free.

    Raises
    ------
    CheckpointExistsError
        A published checkpoint stands there and `overwrite` is false.
    StorageError
        The directory cannot be made, or the file system has no room.

    Notes
    -----
    For one process. What a crashed save left in the directory is removed.
    """
    try:
        # This node may remember another directory, which was set aside elsewhere.
        outlast(directory)
        make_directory(directory)
        claim()
        _refuse_published(directory, overwrite=overwrite)
        sweep(directory)
        for name in shard_subdirectories(world_size):
            make_directory(directory / name)
        make_space(nbytes)
        _require_room(directory, nbytes)
        return Room(save_id=_new_id(directory), inode=_inode_of(directory))
    except BaseException:
        remove_if_empty(directory, world_size)
        raise


def enter_room(shard: Path, directory: Path, inode: int) -> None:
    """Make this node see the directories that the root has made for a shard.

    Raises
    ------
    StorageError
        They do not come within a few seconds, or the file system refuses.
    """
    with storage_errors("find", directory):
        meet(directory, inode)
    if shard.parent != directory:
        with storage_errors("find", shard.parent):
            meet(shard.parent)


def remove_if_empty(directory: Path, world_size: int) -> None:
    """Remove a checkpoint's directories, as far as they are empty."""
    for name in [*shard_subdirectories(world_size), "."]:
        with contextlib.suppress(OSError):
            (directory / name).rmdir()


def _refuse_published(directory: Path, *, overwrite: bool) -> None:
    try:
        read_manifest(directory)
    except CheckpointNotFoundError:
        return
    except StorageError:
        raise
    except CheckpointError:
        pass  # damaged, but there: not ours to replace without being asked
    if not overwrite:
        raise CheckpointExistsError(
            f"{directory} already holds a published checkpoint, which a save never "
            "touches; save to another path, or pass overwrite=True to replace it once "
            "the new one is published"
        )


def _inode_of(directory: Path) -> int:
    with storage_errors("look at", directory):
        return os.stat(directory).st_ino


def _require_room(directory: Path, nbytes: int) -> None:
    free = free_nbytes(directory)
    if free < nbytes:
        raise StorageError(
            f"{directory}: the checkpoint needs {nbytes} bytes, the file system has "
            f"{free} free; remove older checkpoints or save elsewhere",
            errno=errno.ENOSPC,
            path=str(directory),
        )


def _new_id(directory: Path) -> str:
    taken = {
        name.id8
        for name in (parse_shard_name(path.name) for path in own_files(directory))
        if name is not None
    }
    while True:
        save_id = secrets.token_hex(16)
        if save_id[:8] not in taken:
            return save_id
