"""Writes the files of one checkpoint, for one process; knows files, not MPI.

Every rank calls `write_shard_file`; one of them, the root, calls the others.
"""

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from mpickpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
)
from mpickpt.format.manifest import dump_manifest
from mpickpt.format.naming import (
    TMP_SUFFIX,
    layout_name,
    parse_shard_name,
    receipts_name,
    shard_subdirectories,
)
from mpickpt.format.records import LayoutRecord, ShardManifest
from mpickpt.storage.catalog import missing_shards, read_manifest
from mpickpt.storage.commit import (
    discard,
    make_directory,
    publish,
    publish_manifest,
    storage_errors,
)
from mpickpt.storage.filesystem import free_nbytes, wants_direct
from mpickpt.storage.removal import own_files
from mpickpt.storage.second_look import SecondLook, meet, outlast
from mpickpt.storage.shard_draft import ShardDraft, ShardLayout
from mpickpt.storage.shard_image import build_image
from mpickpt.storage.staging import StagedShard
from mpickpt.storage.stream import (
    ShardDigest,
    WholeFileSha256,
    read_shard,
    write_shard,
)
from mpickpt.storage.sweep import sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStyle:
    """How shards are written: block length in bytes, direct I/O, reading back."""

    block_nbytes: int
    direct_io: str
    read_back: bool


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


def write_shard_file(
    path: Path, draft: ShardDraft, style: WriteStyle, cancelled: Event | None = None
) -> ShardDigest:
    """Write one shard and make it durable under its final name.

    Raises
    ------
    StorageError
        The file system refused; nothing of the shard stays.
    CorruptShardError
        Reading back found other bytes than were written.

    Notes
    -----
    Durable when it returns.
    """
    tmp = path.with_name(path.name + TMP_SUFFIX)
    with _removed_on_failure(tmp):
        digest = _write(tmp, draft, style, cancelled)
        publish(tmp, path)
    return digest


def write_staged_file(
    path: Path, staged: StagedShard, style: WriteStyle, cancelled: Event | None = None
) -> ShardDigest:
    """Write one shard that was copied; otherwise as `write_shard_file`."""
    tmp = path.with_name(path.name + TMP_SUFFIX)
    with _removed_on_failure(tmp):
        digest = staged.write(
            tmp,
            block_nbytes=style.block_nbytes,
            direct=wants_direct(tmp.parent, style.direct_io),
            cancelled=cancelled,
        )
        _read_back_if_asked(tmp, digest, style)
        publish(tmp, path)
    return digest


def write_layout_file(
    directory: Path, document: bytes, style: WriteStyle
) -> LayoutRecord:
    """Write the layout file, an HDF5 file whose only text is the layout; durable."""
    image = build_image([], lambda _: len(document))
    layout = ShardLayout(arrays=(), image=image, records=None)  # type: ignore[arg-type]
    draft = ShardDraft(layout=layout, index=document, parts=())
    tmp_name = layout_name(hashlib.sha256(document).hexdigest()) + TMP_SUFFIX
    with _removed_on_failure(directory / tmp_name):
        digest = _write(directory / tmp_name, draft, style)
        # Named by all its bytes: where a save overwrites, a published layout file is
        # never replaced by one that another HDF5 library laid out differently.
        name = layout_name(digest.sha256)
        publish(directory / tmp_name, directory / name)
    payload = (image.index_offset, image.index_nbytes, digest.index_crc32)
    return LayoutRecord(
        path=name, nbytes=digest.nbytes, sha256=digest.sha256, payload=payload
    )


def _write(
    tmp: Path, draft: ShardDraft, style: WriteStyle, cancelled: Event | None = None
) -> ShardDigest:
    digest = write_shard(
        tmp,
        draft.layout.image,
        draft.index,
        draft.parts,
        block_nbytes=style.block_nbytes,
        direct=wants_direct(tmp.parent, style.direct_io),
        cancelled=cancelled,
    )
    _read_back_if_asked(tmp, digest, style)
    return digest


@contextlib.contextmanager
def _removed_on_failure(tmp: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        discard(tmp)
        raise


def write_receipts_file(directory: Path, save_id: str, document: bytes) -> None:
    """Write how long each rank took; nobody depends on it, so it is not synced."""
    path = directory / receipts_name(save_id)
    with storage_errors("write", path):
        path.write_bytes(document)


def publish_checkpoint(directory: Path, manifest: ShardManifest) -> bytes:
    """Give the checkpoint its manifest, durably; return the manifest's bytes.

    Raises
    ------
    IncompleteCheckpointError
        A shard is gone: another save of the same path, at the same time, swept it.
    """
    _require_shards(directory, manifest)
    content = dump_manifest(manifest)
    publish_manifest(directory, content)
    return content


def remove_if_empty(directory: Path, world_size: int) -> None:
    """Remove a checkpoint's directories, as far as they are empty."""
    for name in [*shard_subdirectories(world_size), "."]:
        with contextlib.suppress(OSError):
            (directory / name).rmdir()


def _require_shards(directory: Path, manifest: ShardManifest) -> None:
    look: SecondLook | None = None
    while missing := missing_shards(directory, manifest):
        path = directory / missing[0]
        error = IncompleteCheckpointError(
            f"{path} is gone since it was written, with "
            f"{len(missing) - 1} others; do two programs save to this path at once?",
            path=str(path),
        )
        # Other nodes have just made them.
        look = look or SecondLook(path, is_new=True)
        if not look.helps(error):
            raise error


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


def _read_back_if_asked(path: Path, digest: ShardDigest, style: WriteStyle) -> None:
    if not style.read_back:
        return
    read_shard(
        path,
        nbytes=digest.nbytes,
        spans=[(0, digest.nbytes)],
        check=WholeFileSha256(digest.sha256),
        deliver=lambda _offset, _view: None,
        direct=wants_direct(path.parent, style.direct_io),
    )
