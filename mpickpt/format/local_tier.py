"""Says in a manifest which shards lie on which node's disk; touches no file."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mpickpt.format.records import ShardManifest, ShardRecord

TIER_FIELD = "tier"
LOCAL = "local"


def with_local_tier(
    manifest: ShardManifest,
    *,
    nodes: Mapping[str, Sequence[int]],
    copies: Mapping[str, Sequence[int]],
) -> ShardManifest:
    """Return a manifest that says where shards lie, on no node in particular.

    Parameters
    ----------
    manifest : ShardManifest
        Of the checkpoint.
    nodes, copies : mapping of str to sequence of int
        Names of nodes; whose shards were written there, and whose copies lie there.
    """
    tier = {"kind": LOCAL, "nodes": dict(nodes), "copies": dict(copies)}
    return _with_tier(manifest, tier)


def for_node(manifest: ShardManifest, name: str) -> ShardManifest:
    """Return the manifest that the disk of one of its nodes gets."""
    return _with_tier(manifest, manifest.extra[TIER_FIELD] | {"node": name})


def shards_here(manifest: ShardManifest) -> tuple[ShardRecord, ...]:
    """Return the shards that lie beside a manifest, as far as it tells.

    All of them, but where the manifest was written for one node's disk.
    """
    tier = manifest.extra.get(TIER_FIELD)
    if not isinstance(tier, dict) or tier.get("kind") != LOCAL:
        return manifest.shards
    if (node := tier.get("node")) is None:
        return manifest.shards
    ranks = {*_ranks(tier.get("nodes"), node), *_ranks(tier.get("copies"), node)}
    return tuple(shard for shard in manifest.shards if shard.rank in ranks)


def has_layout_here(manifest: ShardManifest) -> bool:
    """Tell whether the layout file lies beside a manifest, as far as it tells.

    It goes with the shard of rank 0.
    """
    here = shards_here(manifest)
    return manifest.layout is not None and bool(here) and here[0].rank == 0


def _with_tier(manifest: ShardManifest, tier: dict[str, Any]) -> ShardManifest:
    extra = manifest.extra | {TIER_FIELD: tier}
    return msgspec.structs.replace(manifest, extra=extra)


def _ranks(by_node: Any, node: Any) -> list[int]:
    """Return the ranks of a node; of a field that any writer may have written."""
    ranks = by_node.get(node, []) if isinstance(by_node, dict) else []
    if not isinstance(ranks, list | tuple):
        return []
    return [rank for rank in ranks if isinstance(rank, int)]
