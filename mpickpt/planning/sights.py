"""Puts together what lies on the disks of the nodes of a job; records and rules, pure.

Each node tells of the directories in its run directory that are named after steps:
which checkpoint is published there, and which whole-sized files lie there.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from mpickpt.format.naming import parse_layout_name, parse_shard_path
from mpickpt.format.records import ShardManifest
from mpickpt.planning.sources import Whereabouts, files_of


class StepSight(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has of one step.

    Attributes
    ----------
    step : int
        The step in the directory's name.
    checkpoint_id : str or None
        Of the manifest; None where there is none that can be read.
    created_at : str
        As the manifest says.
    problem : str
        What is wrong with the manifest that is there; "" if nothing is.
    attempts : int
        How often a restore was begun without progress since.
    files : dict of str to int
        Size of each shard and layout file by its relative path.
    """

    step: int
    checkpoint_id: str | None = None
    created_at: str = ""
    problem: str = ""
    attempts: int = 0
    files: dict[str, int] = {}


class NodeSight(msgspec.Struct, frozen=True, kw_only=True):
    """What one node has of a run.

    Attributes
    ----------
    steps : list of StepSight
        Its directories, in order of step.
    problem : str
        Why they cannot be looked at; "" if they can.
    """

    steps: list[StepSight] = []
    problem: str = ""

    def encode(self) -> bytes:
        """Return the message to the rank that puts all sights together."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, message: bytes) -> "NodeSight":
        """Return the sight that a message tells of."""
        return msgspec.msgpack.decode(message, type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpoint:
    """One checkpoint of which some node has the manifest.

    Attributes
    ----------
    step : int
        The step.
    checkpoint_id : str
        Its id.
    created_at : str
        When it was saved.
    published : tuple of int
        The nodes that have its manifest.
    lacking : tuple of int
        Nodes that hold a shard of it, but no manifest that can be read.
    """

    step: int
    checkpoint_id: str
    created_at: str
    published: tuple[int, ...]
    lacking: tuple[int, ...]


class Sights:
    """What all nodes have together.

    Parameters
    ----------
    sights : sequence of NodeSight
        By node.
    """

    def __init__(self, sights: Sequence[NodeSight]) -> None:
        self._by_step: defaultdict[int, dict[int, StepSight]] = defaultdict(dict)
        for node, sight in enumerate(sights):
            for seen in sight.steps:
                self._by_step[seen.step][node] = seen

    def steps(self) -> list[int]:
        """Return the steps that have a manifest somewhere, damaged ones included."""
        return sorted(
            step
            for step, seen in self._by_step.items()
            if any(one.checkpoint_id or one.problem for one in seen.values())
        )

    def checkpoints(self, step: int) -> list[LocalCheckpoint]:
        """Return the checkpoints of a step, the one saved last first.

        There are several where a node was away while the step was saved once more.
        """
        seen = self._by_step.get(step, {})
        ids = {one.checkpoint_id for one in seen.values() if one.checkpoint_id}
        found = [self._checkpoint(step, checkpoint_id) for checkpoint_id in sorted(ids)]
        return sorted(found, key=lambda one: one.created_at, reverse=True)

    def problems(self, step: int) -> dict[int, str]:
        """Return what is wrong with manifests of a step, by node."""
        seen = self._by_step.get(step, {})
        return {node: one.problem for node, one in seen.items() if one.problem}

    def attempts(self, step: int) -> int:
        """Return how often a restore of a step was begun, by the node with most."""
        seen = self._by_step.get(step, {})
        return max((one.attempts for one in seen.values()), default=0)

    def nodes_with(self, manifest: ShardManifest) -> list[set[int]]:
        """Return the nodes that have each file of a checkpoint, of the right size."""
        files = files_of(manifest)
        number = {record.path: file for file, record in enumerate(files)}
        nodes: list[set[int]] = [set() for _ in files]
        for node, seen in self._by_step.get(manifest.step, {}).items():
            for path, nbytes in seen.files.items():
                file = number.get(path)
                if file is not None and files[file].nbytes == nbytes:
                    nodes[file].add(node)
        return nodes

    def whereabouts(
        self, manifest: ShardManifest, missing_in: Sequence[Iterable[str] | None]
    ) -> Whereabouts:
        """Return where each file of a checkpoint is.

        Parameters
        ----------
        manifest : ShardManifest
            Of the checkpoint.
        missing_in : sequence of (iterable of str or None)
            For each further tier the paths that it has not; None where it has nothing
            of this checkpoint.
        """
        gaps = [None if paths is None else set(paths) for paths in missing_in]
        tiers = [
            [
                tier
                for tier, gap in enumerate(gaps)
                if gap is not None and record.path not in gap
            ]
            for record in files_of(manifest)
        ]
        return Whereabouts(nodes=self.nodes_with(manifest), tiers=tiers)

    def _checkpoint(self, step: int, checkpoint_id: str) -> LocalCheckpoint:
        seen = self._by_step[step]
        published = [n for n, s in seen.items() if s.checkpoint_id == checkpoint_id]
        id8 = checkpoint_id[:8]
        lacking = [
            node
            for node, one in seen.items()
            if one.checkpoint_id is None and _has_shard(one.files, id8)
        ]
        return LocalCheckpoint(
            step=step,
            checkpoint_id=checkpoint_id,
            created_at=seen[published[0]].created_at,
            published=tuple(published),
            lacking=tuple(lacking),
        )


def is_listed(relative: str) -> bool:
    """Tell whether a path is one that a node tells of: a shard or a layout file."""
    return (
        parse_shard_path(relative) is not None
        or parse_layout_name(relative) is not None
    )


def _has_shard(paths: Iterable[str], id8: str) -> bool:
    names = map(parse_shard_path, paths)
    return any(name is not None and name.id8 == id8 for name in names)
