"""Makes the directories where a save is going to write; files only, no MPI.

The root makes them and looks for space; every rank enters them before it writes.
"""

import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mpickpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    StorageError,
)
from mpickpt.format.naming import parse_shard_name, shard_subdirectories
from mpickpt.planning.blocks import block_nbytes_for, usual_block_nbytes
from mpickpt.planning.striping import Wish
from mpickpt.storage.catalog import read_manifest
from mpickpt.storage.commit import make_directory, storage_errors
from mpickpt.storage.filesystem import file_system_of, wants_direct
from mpickpt.storage.removal import own_files
from mpickpt.storage.second_look import meet, outlast
from mpickpt.storage.space import require_space
from mpickpt.storage.striping import stripe, targets_of
from mpickpt.storage.sweep import sweep

_N_FILES_BESIDE_SHARDS = 3  # manifest, layout, receipts


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a save is going to write, and how it was asked to.

    Attributes
    ----------
    world_size : int
        Number of shards to come.
    nbytes : int
        Bytes to come, of all ranks.
    overwrite : bool
        Whether a published checkpoint may stand there already.
    block_nbytes : int or None
        Length of one write; None is what suits the file system.
    direct_io : {"auto", "on", "off"}
        Whether to go around the page cache.
    striping : {"site", "auto"}, Striping or ProgressiveStriping
        How shards go over the servers of Lustre.
    known_shared : bool
        Whether all nodes are known to see what lies in the run directory.
    n_shards : int or None
        Number of shards to come in this directory; None is all of them.
    """

    world_size: int
    nbytes: int
    overwrite: bool
    block_nbytes: int | None
    direct_io: str
    striping: Wish
    known_shared: bool = False
    n_shards: int | None = None

    @property
    def n_shards_here(self) -> int:
        """Number of shards to come in this directory."""
        return self.world_size if self.n_shards is None else self.n_shards

    @property
    def shard_nbytes(self) -> int:
        """Bytes of one shard, on average."""
        return -(-self.nbytes // self.n_shards_here)

    @property
    def n_files(self) -> int:
        """Number of files and directories to come."""
        return (
            self.n_shards_here
            + len(shard_subdirectories(self.world_size))
            + _N_FILES_BESIDE_SHARDS
        )


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how all ranks of a save write, as the root has found it.

    Attributes
    ----------
    save_id : str
        Id of the save, 32 hex digits.
    inode : int
        Inode number of the directory, on the root's node.
    block_nbytes : int
        Length of one write, in bytes.
    direct : bool
        Whether to go around the page cache.
    known_shared : bool
        As in the demand: what the root knows counts.
    creates_per_s : float or None
        How many files the ranks together should create each second.
    """

    save_id: str
    inode: int
    block_nbytes: int
    direct: bool
    known_shared: bool
    creates_per_s: float | None

    def encode(self) -> bytes:
        """Return the message to the other ranks."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, message: bytes) -> "Room":
        """Return the room that a message tells of."""
        return msgspec.json.decode(message, type=cls)


def make_room(
    directory: Path,
    demand: Demand,
    *,
    claim: Callable[[], None],
    make_space: Callable[[int], None],
    save_id: str | None = None,
) -> Room:
    """Make the directories of a checkpoint, where a save is going to write.

    Parameters
    ----------
    directory : Path
        Of the checkpoint.
    demand : Demand
        What is going to be written.
    claim : callable
        Called once the directory is there, before anything in it is removed; raises
        if others save there too.
    make_space : callable of int
        May remove older checkpoints, so that as many bytes are free.
    save_id : str, optional
        Id of the save, where it was drawn elsewhere.

    Raises
    ------
    CheckpointExistsError
        A published checkpoint stands there and the demand is not to overwrite it.
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
        _refuse_published(directory, overwrite=demand.overwrite)
        sweep(directory)
        file_system = file_system_of(directory)
        # Files and directories inherit a layout when they are made, and only then.
        striped = stripe(
            directory,
            file_system,
            demand.striping,
            shard_nbytes=demand.shard_nbytes,
            n_ranks=demand.n_shards_here,
        )
        for name in shard_subdirectories(demand.world_size):
            make_directory(directory / name)
        make_space(demand.nbytes)
        require_space(
            directory,
            file_system,
            nbytes=demand.nbytes,
            n_files=demand.n_files,
            osts=targets_of(directory, file_system, striped),
        )
        usual_nbytes = usual_block_nbytes(demand.shard_nbytes)
        return Room(
            save_id=save_id or _new_id(directory),
            inode=_inode_of(directory),
            block_nbytes=demand.block_nbytes
            or block_nbytes_for(file_system, striped.layout, usual_nbytes),
            direct=wants_direct(file_system, demand.direct_io),
            known_shared=demand.known_shared,
            creates_per_s=file_system.habits.creates_per_s,
        )
    except BaseException:
        remove_if_empty(directory, demand.world_size)
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
