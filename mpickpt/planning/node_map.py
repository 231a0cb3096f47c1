"""Says which ranks share a node's disk; pure functions and records."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

KEY_NBYTES = 16  # of a view, and of a digest of the path
NAME_NBYTES = 64  # as long as a host name can be on Linux

_RECORD = struct.Struct(f"{KEY_NBYTES}s{KEY_NBYTES}s{NAME_NBYTES}s")


@dataclass(frozen=True, kw_only=True)
class NodeMap:
    """Which ranks are on which node.

    Attributes
    ----------
    names : tuple of str
        Of the nodes, in order of their lowest ranks; each once.
    node_of : tuple of int
        For each rank the number of its node.
    """

    names: tuple[str, ...]
    node_of: tuple[int, ...]

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.names)

    @cached_property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of each node."""
        lowest: dict[int, int] = {}
        for rank, node in enumerate(self.node_of):
            lowest.setdefault(node, rank)
        return tuple(lowest[node] for node in range(self.n_nodes))

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's node."""
        return self.names[self.node_of[rank]]

    def leader_of(self, rank: int) -> int:
        """Return the lowest rank on a rank's node."""
        return self.leaders[self.node_of[rank]]

    def ranks_on(self, node: int) -> list[int]:
        """Return the ranks on a node, ascending."""
        return [rank for rank, own in enumerate(self.node_of) if own == node]

    def ranks_by_name(self) -> dict[str, list[int]]:
        """Return the ranks on each node."""
        found: dict[str, list[int]] = {name: [] for name in self.names}
        for rank, node in enumerate(self.node_of):
            found[self.names[node]].append(rank)
        return found


def pack_node_record(view: bytes, path: bytes, name: str) -> bytes:
    """Return what a rank tells all others of its node, of the same length on each.

    Parameters
    ----------
    view, path : bytes, shape (KEY_NBYTES,)
        Two ranks are on one node where both are equal: what they see of files, and
        which directory they call their node's.
    name : str
        Of the node.
    """
    return _RECORD.pack(view, path, _cut(name))


def map_nodes(records: Sequence[bytes]) -> NodeMap:
    """Return the nodes of all ranks.

    Parameters
    ----------
    records : sequence of bytes
        What `pack_node_record` gave on each rank.

    Returns
    -------
    NodeMap
        Where two nodes have one name, the second is "NAME-2".
    """
    numbers: dict[bytes, int] = {}
    names: list[str] = []
    node_of = []
    for record in records:
        key = record[: 2 * KEY_NBYTES]
        if key not in numbers:
            numbers[key] = len(names)
            names.append(record[2 * KEY_NBYTES :].rstrip(b"\0").decode())
        node_of.append(numbers[key])
    return NodeMap(names=_made_unique(names), node_of=tuple(node_of))


def _made_unique(names: Sequence[str]) -> tuple[str, ...]:
    taken = set(names)
    seen: set[str] = set()
    unique = []
    for name in names:
        chosen, number = name, 1
        while chosen in seen or (number > 1 and chosen in taken):
            number += 1
            chosen = f"{name}-{number}"
        seen.add(chosen)
        unique.append(chosen)
    return tuple(unique)


def _cut(name: str) -> bytes:
    whole = name.encode("utf-8", "replace")[:NAME_NBYTES]
    return whole.decode("utf-8", "ignore").encode()
