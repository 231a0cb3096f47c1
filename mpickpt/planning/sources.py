"""Decides from where each file of a checkpoint comes that a node has not; pure.

Files are numbered: a shard by the rank that saved it, the layout file after them. All
ranks know the same whereabouts, and so make the same plan.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mpickpt.format.records import LayoutRecord, ShardManifest, ShardRecord
from mpickpt.planning.node_map import NodeMap
from mpickpt.planning.rank_loads import RankLoads

FileRecord = ShardRecord | LayoutRecord
Need = tuple[int, int]  # a file, and a rank that wants it on its node

_MOST_NAMED = 8


def files_of(manifest: ShardManifest) -> list[FileRecord]:
    """Return the files of a checkpoint by their numbers."""
    files: list[FileRecord] = list(manifest.shards)
    return files if manifest.layout is None else [*files, manifest.layout]


@dataclass(slots=True, kw_only=True)
class Whereabouts:
    """Which nodes and which further tiers have each file, as far as is known.

    Attributes
    ----------
    nodes : list of set of int
        By file, the nodes on whose disk it lies.
    tiers : list of list of int
        By file, the further tiers that hold it, the nearest first.
    struck : dict of int to list of str
        By file, which places turned out not to have it whole, each with the reason.
    """

    nodes: list[set[int]]
    tiers: list[list[int]]
    struck: dict[int, list[str]] = field(default_factory=dict)

    def strike(
        self,
        file: int,
        reason: str,
        *,
        node: int | None = None,
        tier: int | None = None,
    ) -> None:
        """Remember that a file is not whole on a node, or not in a tier."""
        if node is not None:
            self.nodes[file].discard(node)
        if tier is not None and tier in self.tiers[file]:
            self.tiers[file].remove(tier)
        self.struck.setdefault(file, []).append(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One file that goes to the disk of a node.

    Attributes
    ----------
    file : int
        Its number.
    dest : int
        The rank that writes it there.
    sender : int or None
        The rank that reads it from the disk of its node.
    tier : int or None
        The further tier that it is copied from, where no node has it.
    """

    file: int
    dest: int
    sender: int | None = None
    tier: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What goes where.

    Attributes
    ----------
    passages : tuple of Passage
        What is going to be moved.
    nowhere : tuple of int
        Files that are needed and that no place has any more.
    """

    passages: tuple[Passage, ...]
    nowhere: tuple[int, ...]


def needs_of_load(readers: Sequence[int], manifest: ShardManifest) -> list[Need]:
    """Return which files a load wants on which ranks' nodes.

    Parameters
    ----------
    readers : sequence of int
        The rank that reads each shard. Rank 0 verifies the layout file.
    manifest : ShardManifest
        Of the checkpoint.
    """
    needs = list(enumerate(readers))
    return needs if manifest.layout is None else [*needs, (len(readers), 0)]


def unmet(needs: Iterable[Need], where: Whereabouts, nodes: NodeMap) -> list[Need]:
    """Return the needs that no file on the rank's own node meets, each node's once."""
    found: dict[tuple[int, int], Need] = {}
    for file, rank in needs:
        node = nodes.node_of[rank]
        if node not in where.nodes[file]:
            found.setdefault((file, node), (file, rank))
    return list(found.values())


def plan_passages(
    needs: Iterable[Need], where: Whereabouts, nodes: NodeMap, nbytes: Sequence[int]
) -> Plan:
    """Return from where each file that is needed comes: nearest first.

    Parameters
    ----------
    needs : iterable of (int, int)
        Files, and the ranks that want them.
    where : Whereabouts
        Who has what.
    nodes : NodeMap
        Of the present ranks.
    nbytes : sequence of int
        Length of each file.

    Returns
    -------
    Plan
        Another node's disk comes before any further tier. The ranks that send have
        about as many bytes each, the largest files being given out first.
    """
    passages, nowhere = [], []
    loads = RankLoads(nodes.node_of)
    for file, dest in sorted(
        unmet(needs, where, nodes), key=lambda need: (-nbytes[need[0]], need)
    ):
        if where.nodes[file]:
            sender = loads.lightest(where.nodes[file])
            loads.add(sender, nbytes[file])
            passages.append(Passage(file=file, dest=dest, sender=sender))
        elif where.tiers[file]:
            tier = where.tiers[file][0]
            passages.append(Passage(file=file, dest=dest, tier=tier))
        else:
            nowhere.append(file)
    return Plan(passages=tuple(passages), nowhere=tuple(sorted(set(nowhere))))


def sources_said(
    needs: Sequence[Need],
    moved: Iterable[Passage],
    nodes: NodeMap,
    tiers: Sequence[str],
) -> str:
    """Return in words which source gave what of a checkpoint.

    Parameters
    ----------
    needs : sequence of (int, int)
        Which shards were wanted on which ranks' nodes.
    moved : iterable of Passage
        Those that were brought.
    nodes : NodeMap
        Of the present ranks.
    tiers : sequence of str
        What the further tiers are called.
    """
    last = {(one.file, nodes.node_of[one.dest]): one for one in moved}
    counts: Counter[str] = Counter()
    for file, rank in dict.fromkeys(needs):
        passage = last.get((file, nodes.node_of[rank]))
        counts[_place(passage, nodes, tiers)] += 1
    own = counts.pop("", 0)
    words = (
        [f"{_shards(own)} from the nodes that read them"] if own or not counts else []
    )
    for place, count in counts.most_common(_MOST_NAMED):
        words.append(f"{count if words else _shards(count)} from {place}")
    rest = sum(counts.values()) - sum(n for _, n in counts.most_common(_MOST_NAMED))
    return ", ".join(words) + (f", {rest} from other nodes" if rest else "")


def _place(passage: Passage | None, nodes: NodeMap, tiers: Sequence[str]) -> str:
    if passage is None:
        return ""
    if passage.tier is not None:
        return tiers[passage.tier]
    assert passage.sender is not None
    return f"node {nodes.names[nodes.node_of[passage.sender]]}"


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"


def ranks_by_node(
    where: Whereabouts, nodes: NodeMap, readers: Sequence[int]
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return whose shards lie on each node: read there, and kept besides.

    Parameters
    ----------
    where : Whereabouts
        Who has what.
    nodes : NodeMap
        Of the present ranks.
    readers : sequence of int
        The rank that reads each shard.
    """
    read: dict[str, list[int]] = {name: [] for name in nodes.names}
    kept: dict[str, list[int]] = {name: [] for name in nodes.names}
    for shard, reader in enumerate(readers):
        for node in sorted(where.nodes[shard]):
            is_own = nodes.node_of[reader] == node
            (read if is_own else kept)[nodes.names[node]].append(shard)
    return read, kept
