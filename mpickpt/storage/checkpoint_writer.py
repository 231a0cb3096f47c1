"""Writes the files of one checkpoint, for one process; knows files, not MPI.

Every rank calls `write_shard_file`; one of them, the root, calls the others.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from mpickpt.errors import IncompleteCheckpointError
from mpickpt.format.local_tier import shards_here
from mpickpt.format.manifest import dump_manifest
from mpickpt.format.naming import TMP_SUFFIX, layout_name, receipts_name
from mpickpt.format.records import LayoutRecord, ShardManifest
from mpickpt.storage.catalog import missing_shards
from mpickpt.storage.commit import discard, publish, storage_errors
from mpickpt.storage.manifest_publishing import (
    StagedManifest,
    publish_manifest,
    stage_manifest,
)
from mpickpt.storage.second_look import SecondLook
from mpickpt.storage.shard_draft import ShardDraft, ShardLayout
from mpickpt.storage.shard_image import build_image
from mpickpt.storage.staging import StagedShard
from mpickpt.storage.stream import (
    ShardDigest,
    WholeFileSha256,
    read_shard,
    write_shard,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStyle:
    """How shards are written, alike on all ranks.

    Attributes
    ----------
    block_nbytes : int
        Length of one write, in bytes.
    direct : bool
        Whether to go around the page cache, where the file system can.
    read_back : bool
        Whether to read each file again and compare its digest.
    """

    block_nbytes: int
    direct: bool
    read_back: bool


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
            direct=style.direct,
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
        direct=style.direct,
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


def stage_checkpoint(directory: Path, manifest: ShardManifest) -> StagedManifest:
    """Make the manifest ready; otherwise as `publish_checkpoint`."""
    _require_shards(directory, manifest)
    return stage_manifest(directory, dump_manifest(manifest))


def _require_shards(directory: Path, manifest: ShardManifest) -> None:
    look: SecondLook | None = None
    here = {shard.path for shard in shards_here(manifest)}
    while missing := here.intersection(missing_shards(directory, manifest)):
        path = directory / min(missing)
        error = IncompleteCheckpointError(
            f"{path} is gone since it was written, with "
            f"{len(missing) - 1} others; do two programs save to this path at once?",
            path=str(path),
        )
        # Other nodes have just made them.
        look = look or SecondLook(path, is_new=True)
        if not look.helps(error):
            raise error


def _read_back_if_asked(path: Path, digest: ShardDigest, style: WriteStyle) -> None:
    if not style.read_back:
        return
    read_shard(
        path,
        nbytes=digest.nbytes,
        spans=[(0, digest.nbytes)],
        check=WholeFileSha256(digest.sha256),
        deliver=lambda _offset, _view: None,
        direct=style.direct,
    )
