"""Chooses on which other node each shard is kept once more; pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpickpt.planning.node_map import NodeMap

Array = np.ndarray[Any, Any]

# What a shard holds besides arrays; also spreads shards that have none.
_BESIDE_NBYTES = 4096


@dataclass(frozen=True, kw_only=True)
class PartnerPlan:
    """Who keeps the copy of whose shard.

    Attributes
    ----------
    nodes : NodeMap
        Which ranks are on which node.
    target_of : tuple of int
        For each rank the one that writes the copy of its shard; empty without copies.
    """

    nodes: NodeMap
    target_of: tuple[int, ...]

    @cached_property
    def sources_of(self) -> dict[int, list[int]]:
        """For each rank that writes copies: whose they are, ascending."""
        found: dict[int, list[int]] = {}
        for rank, target in enumerate(self.target_of):
            found.setdefault(target, []).append(rank)
        return found

    def copies_on(self, node: int) -> list[int]:
        """Return the ranks whose copies lie on a node, ascending."""
        node_of = self.nodes.node_of
        return [r for r, target in enumerate(self.target_of) if node_of[target] == node]

    def copies_by_name(self) -> dict[str, list[int]]:
        """Return the ranks whose copies lie on each node."""
        found: dict[str, list[int]] = {name: [] for name in self.nodes.names}
        for rank, target in enumerate(self.target_of):
            found[self.nodes.name_of(target)].append(rank)
        return found

    def shards_on(self, node: int) -> list[int]:
        """Return the ranks whose shards lie on a node, written there or copied."""
        return sorted([*self.nodes.ranks_on(node), *self.copies_on(node)])


def plan_partners(nodes: NodeMap, nbytes: Sequence[int], *, copies: int) -> PartnerPlan:
    """Return on which rank of another node each rank's shard is kept once more.

    Parameters
    ----------
    nodes : NodeMap
        Which ranks are on which node.
    nbytes : sequence of int
        Bytes of each rank's shard, as well as they are known.
    copies : {0, 1}
        0 keeps none.

    Returns
    -------
    PartnerPlan
        No copy is on the node of its shard. Each node gets about as many bytes as it
        gives away, and so does each rank; where more than half of all bytes are on one
        node, it and all others together keep those of each other.

    Raises
    ------
    ValueError
        All ranks are on one node.

    Notes
    -----
    Shards lie one behind the other on a circle, node by node. Each is kept by the
    rank that is opposite: half a circle away is another node, unless one node takes
    more than half of it.
    """
    if not copies:
        return PartnerPlan(nodes=nodes, target_of=())
    if nodes.n_nodes < 2:
        raise ValueError(
            f"copies=1 needs ranks on two nodes or more; all {len(nodes.node_of)} are "
            f"on {nodes.names[0]}: a copy there would be lost with it"
        )
    node_of = np.array(nodes.node_of)
    order = np.argsort(node_of, kind="stable")
    sizes = np.asarray(nbytes, np.int64)[order] + _BESIDE_NBYTES
    on_node = np.zeros(nodes.n_nodes, np.int64)
    np.add.at(on_node, node_of[order], sizes)
    largest = int(on_node.argmax())
    if 2 * on_node[largest] <= sizes.sum():
        opposite = _half_a_circle_away(sizes)
    else:
        opposite = _across(sizes, node_of[order] == largest)
    target_of = np.empty(len(order), np.int64)
    target_of[order] = order[opposite]
    return PartnerPlan(nodes=nodes, target_of=tuple(target_of.tolist()))


def _half_a_circle_away(sizes: Array) -> Array:
    """Return for each shard the position of the one that is opposite its middle."""
    # In halves of a byte, so that middles are whole numbers.
    ends = 2 * np.cumsum(sizes)
    middles = ends - sizes
    points = (middles + ends[-1] // 2) % ends[-1]
    found: Array = np.searchsorted(ends, points, side="right")
    return found


def _across(sizes: Array, is_inside: Array) -> Array:
    """Return for each shard the position of one on the other side of a division."""
    opposite = np.empty(len(sizes), np.int64)
    for side in (is_inside, ~is_inside):
        own, other = np.flatnonzero(side), np.flatnonzero(~side)
        own_ends, other_ends = np.cumsum(sizes[own]), np.cumsum(sizes[other])
        scale = other_ends[-1] / own_ends[-1]
        points = (own_ends - sizes[own] / 2) * scale
        found = np.searchsorted(other_ends, points, side="right")
        opposite[own] = other[np.minimum(found, len(other) - 1)]
    return opposite
