"""Publishes copies of checkpoints: a manifest of their own, when all files are there.

The manifest goes last and at once. Two that publish the same checkpoint do no harm, and
of two that publish different ones in one place the second is told.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from mpickpt.errors import CheckpointExistsError, IncompleteCheckpointError
from mpickpt.format.local_tier import TIER_FIELD
from mpickpt.format.manifest import dump_manifest
from mpickpt.format.records import ShardManifest
from mpickpt.storage.copy_target import CopyTarget, TierKind
from mpickpt.storage.copy_to_directory import DirectoryTarget
from mpickpt.storage.copy_to_store import StoreTarget
from mpickpt.storage.places import Place

_MOST_NAMED = 8


def missing_ranks(target: Place, manifest: ShardManifest) -> list[int]:
    """Return the ranks whose files are not in the target, or not whole.

    Notes
    -----
    The layout file counts as one of rank 0. Names and sizes are compared, and the
    digests that a store keeps; a copy gives a file its name when it is whole.
    """
    return _ranks_of(target_of(target).missing_files(manifest), manifest)


def is_published(target: Place, manifest: ShardManifest) -> bool:
    """Tell whether a target has the checkpoint of this manifest already.

    Raises
    ------
    CheckpointExistsError
        It has another one.
    ManifestError, StorageError
        Its manifest is damaged, or cannot be read.
    """
    return is_in(target_of(target), manifest, target)


def publish_copy(
    target: Place,
    manifest: ShardManifest,
    *,
    kind: TierKind | None = None,
    nodes: Mapping[str, Sequence[int]] | None = None,
) -> bool:
    """Publish a checkpoint of which all files were copied; False if it is already.

    Parameters
    ----------
    target : Path or RemotePath
        Where the files are.
    manifest : ShardManifest
        Of the checkpoint; all of it stays but the fields below.
    kind : {"local", "directory", "object"}, optional
        What the field "tier" of the new manifest says of the place.
    nodes : mapping of str to sequence of int, optional
        Where shards lie on nodes: the ranks that each has.

    Raises
    ------
    CheckpointExistsError
        Another checkpoint is published there.
    IncompleteCheckpointError
        Files are missing, or were removed while it was published: it is not.
    StorageError
        The target refused. It may be published; the same call tells, and ends it.

    Notes
    -----
    Durable and atomic: of two callers one publishes.
    """
    into = target_of(target)
    if not is_in(into, manifest, target):
        _require_files(into, manifest, target)
        tier = _tier(target, kind or into.kind, nodes)
        extra = manifest.extra | {TIER_FIELD: tier}
        content = dump_manifest(msgspec.structs.replace(manifest, extra=extra))
        if into.publish(content):
            _require_files_still(into, manifest, target, content)
            into.tidy(manifest)
            return True
        if not is_in(into, manifest, target):
            raise IncompleteCheckpointError(f"{target} was removed while it was made")
    into.confirm()
    into.tidy(manifest)
    return False


def target_of(place: Place) -> CopyTarget:
    """Return what copies to a place."""
    if isinstance(place, Path):
        return DirectoryTarget(place)
    return StoreTarget(place)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as a message names them: the first few, and how many."""
    text = ", ".join(map(str, ranks[:_MOST_NAMED]))
    more = f", … ({len(ranks)} in all)" if len(ranks) > _MOST_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {text}{more}"


def is_in(into: CopyTarget, manifest: ShardManifest, target: Place) -> bool:
    """Tell what `is_published` tells, of a target that was opened."""
    found = into.published()
    if found is None:
        return False
    if found.checkpoint_id == manifest.checkpoint_id:
        return True
    raise CheckpointExistsError(
        f"{target} holds another checkpoint, of step {found.step} with id {found.id8}; "
        f"the one to be copied, of step {manifest.step}, has id {manifest.id8}"
    )


def _require_files(into: CopyTarget, manifest: ShardManifest, target: Place) -> None:
    missing = into.missing_files(manifest)
    if missing:
        ranks = _ranks_of(missing, manifest)
        raise IncompleteCheckpointError(
            f"{target}: {len(missing)} of {manifest.world_size} shards are not there "
            f"yet, of {ranks_text(ranks)}; the first is {missing[0]}",
            path=str(target / missing[0]),
        )


def _require_files_still(
    into: CopyTarget, manifest: ShardManifest, target: Place, content: bytes
) -> None:
    # Who took what is here for the rest of a dead copy may have begun to remove it.
    try:
        _require_files(into, manifest, target)
    except IncompleteCheckpointError:
        into.withdraw(content)
        raise


def _ranks_of(paths: Sequence[str], manifest: ShardManifest) -> list[int]:
    lacking = set(paths)
    ranks = {shard.rank for shard in manifest.shards if shard.path in lacking}
    if manifest.layout is not None and manifest.layout.path in lacking:
        ranks.add(0)
    return sorted(ranks)


def _tier(
    target: Place, kind: TierKind, nodes: Mapping[str, Sequence[int]] | None
) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    url = str(target.absolute() if isinstance(target, Path) else target)
    tier: dict[str, Any] = {"kind": kind, "url": url, "copied_at": now}
    if nodes is not None:
        tier["nodes"] = {name: list(ranks) for name, ranks in nodes.items()}
    return tier
