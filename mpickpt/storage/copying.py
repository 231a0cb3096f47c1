"""Copies published checkpoints between directories and object stores; no MPI.

A copy has the same files, digests and id, and a manifest of its own, which comes last.
Nothing is remembered but what lies in the target: what is there whole is not copied
again, so whoever goes on after a crash makes the same calls, and any number of
processes may copy one checkpoint at once.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mpickpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
)
from mpickpt.format.local_tier import TIER_FIELD
from mpickpt.format.records import ShardManifest
from mpickpt.storage.catalog import missing_shards, read_manifest
from mpickpt.storage.copy_publishing import (
    is_in,
    is_published,
    missing_ranks,
    publish_copy,
    target_of,
)
from mpickpt.storage.copy_target import CopyControl, FileRecord, files_of
from mpickpt.storage.places import Place

__all__ = [
    "copy_checkpoint",
    "copy_shards",
    "is_published",
    "missing_ranks",
    "own_ranks",
    "publish_copy",
    "ranks_in",
]


def copy_shards(
    manifest: ShardManifest,
    source: Place,
    target: Place,
    ranks: Sequence[int],
    *,
    control: CopyControl | None = None,
    jobs: int = 1,
    replace: bool = False,
) -> int:
    """Copy shards of a published checkpoint; return how many bytes were moved.

    Parameters
    ----------
    manifest : ShardManifest
        Of the checkpoint.
    source, target : Path or RemotePath
        Its directory, and the one that is to hold the copy.
    ranks : sequence of int
        Whose shards. The layout file goes with that of rank 0.
    control : CopyControl, optional
        Pace, progress, and how to break it off.
    jobs : int
        Files that are copied at the same time.
    replace : bool
        Whether to copy also what seems to be there whole: a repair.

    Raises
    ------
    CheckpointExistsError
        Another checkpoint is published in the target.
    CheckpointNotFoundError
        The checkpoint was removed from the source meanwhile, or replaced there.
    CorruptShardError, IncompleteCheckpointError
        A file of the source is damaged or missing.
    StorageError
        The source or the target refused.
    CheckpointError
        It was broken off.

    Notes
    -----
    Not collective. What was copied was verified on the way, and is durable when this
    returns; it is no checkpoint before `publish_copy`.
    """
    control = control or CopyControl()
    into = target_of(target)
    if not (into.seems_published() and is_in(into, manifest, target)):
        into.begin(manifest, source)

    def copied(record: FileRecord) -> int:
        if not replace and into.is_whole(record):
            control.progress(record.nbytes)
            return 0
        try:
            into.take(record, source, control, replace=replace)
        except CheckpointError as error:
            _require_source(manifest, source, target, error)
            raise
        return record.nbytes

    return sum(_each(copied, files_of(manifest, ranks), jobs, control))


def ranks_in(source: Place, manifest: ShardManifest) -> list[int]:
    """Return the ranks whose shards lie in a source, by their names alone."""
    missing = set(missing_shards(source, manifest))
    return [shard.rank for shard in manifest.shards if shard.path not in missing]


def own_ranks(manifest: ShardManifest, here: Sequence[int]) -> list[int]:
    """Return those of the ranks in a source that it is the first to copy.

    On a node's disk these are the ones that were saved there. What is there for a
    partner, in case that its node is lost, the partner copies.
    """
    tier = manifest.extra.get(TIER_FIELD)
    try:
        saved_here = set(tier["nodes"][tier["node"]])  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        return list(here)
    return [rank for rank in here if rank in saved_here]


def copy_checkpoint(
    source: Place,
    target: Place,
    *,
    control: CopyControl | None = None,
    jobs: int = 1,
) -> bool:
    """Copy a whole checkpoint and publish the copy; False if it is there already.

    Parameters
    ----------
    source, target, control, jobs
        As in `copy_shards`.

    Raises
    ------
    CheckpointError
        As `copy_shards` and `publish_copy`, and where the source is no checkpoint.
    """
    manifest = read_manifest(source)
    if is_published(target, manifest):
        publish_copy(target, manifest)
        return False
    ranks = range(manifest.world_size)
    copy_shards(manifest, source, target, ranks, control=control, jobs=jobs)
    return publish_copy(target, manifest)


def _each(
    copied: Callable[[FileRecord], int],
    files: Sequence[FileRecord],
    jobs: int,
    control: CopyControl,
) -> list[int]:
    if jobs == 1 or len(files) < 2:
        return [copied(record) for record in files]
    with ThreadPoolExecutor(min(jobs, len(files))) as threads:
        try:
            return list(threads.map(copied, files))
        except BaseException as failure:
            threads.shutdown(wait=False, cancel_futures=True)
            if not isinstance(failure, Exception):
                control.cancelled.set()  # Ctrl-C does not wait for whole files
            raise


def _require_source(
    manifest: ShardManifest, source: Place, target: Place, failure: CheckpointError
) -> None:
    """Raise CheckpointNotFoundError if the checkpoint is not in the source any more."""
    if isinstance(failure, CheckpointExistsError):
        return
    try:
        found = read_manifest(source)
    except CheckpointNotFoundError:
        what = "removed"
    except CheckpointError:
        return
    else:
        if found.checkpoint_id == manifest.checkpoint_id:
            return
        what = "replaced by another of the same name"
    raise CheckpointNotFoundError(
        f"{source}: the checkpoint of step {manifest.step} was {what} while it was "
        f"copied to {target}, where nothing of it is published"
    ) from failure
