"""Brings files of a checkpoint to the disks of the nodes that want them.

The nearest source is asked first: another node's disk, then the further tiers in their
order. What comes is verified by its SHA-256 before it gets its name. A source that
turns out damaged or gone is struck out, for that file alone, and the next one is asked.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpickpt.errors import IncompleteCheckpointError
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.carrying import Copier, Porter
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.ferry import PHASE, Activity, Ferry
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.node_map import NodeMap
from mpickpt.planning.sources import (
    FileRecord,
    Need,
    Passage,
    Plan,
    Whereabouts,
    files_of,
    plan_passages,
)
from mpickpt.storage.commit import make_directory
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.places import Place
from mpickpt.storage.space import require_space

_MOST_PLACES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where one rank keeps a checkpoint, and where else it may be found.

    Attributes
    ----------
    nodes : NodeMap
        Of the present ranks.
    directory : Path
        Of the checkpoint, on the disk of this rank's node.
    tiers : sequence of Path or RemotePath
        Its directory in each further tier, the nearest first.
    """

    nodes: NodeMap
    directory: Path
    tiers: Sequence[Place]


@dataclass(slots=True, kw_only=True)
class Bringing:
    """Brings files of one checkpoint, as often as some are wanted.

    Attributes
    ----------
    talk : Conversation
        The ranks.
    site : Site
        Where the files go.
    manifest : ShardManifest
        Of the checkpoint.
    where : Whereabouts
        Who has what; the same on all ranks, and kept up to date.
    tag : int
        Of the messages of this restore alone.
    moved : list of Passage
        What was brought so far.
    """

    talk: Conversation
    site: Site
    manifest: ShardManifest
    where: Whereabouts
    tag: int
    moved: list[Passage] = field(default_factory=list)

    @property
    def files(self) -> list[FileRecord]:
        """The files of the checkpoint by their numbers."""
        return files_of(self.manifest)

    def steps(self, needs: Sequence[Need]) -> Steps[None]:
        """Bring what is wanted on nodes that have it not; durable when it returns.

        Parameters
        ----------
        needs : sequence of (int, int)
            Files, and ranks on whose node each is wanted; the same on all ranks.

        Raises
        ------
        IncompleteCheckpointError
            No source is left for some file; tells every place that was asked.
        StorageError
            The disk of a node refuses what comes.

        Notes
        -----
        Collective. What a killed program brought stays, and is not brought again.
        """
        files = self.files
        nbytes = [record.nbytes for record in files]
        while True:
            plan = plan_passages(needs, self.where, self.site.nodes, nbytes)
            if plan.nowhere:
                raise self.nowhere(plan.nowhere)
            if not plan.passages:
                return
            yield from self.talk.agree(
                lambda plan=plan: self.make_room(plan, files),  # type: ignore[misc]
                PHASE,
            )
            failed = yield from self.between_nodes(plan, files)
            failed |= yield from self.from_tiers(plan, files)
            yield from self.learn(plan, failed)

    def make_room(self, plan: Plan, files: Sequence[FileRecord]) -> None:
        """Make the directory of this node, if something comes; refuse what cannot fit.

        The lowest rank of a node does it for all there.
        """
        nodes, rank = self.site.nodes, self.talk.rank
        if nodes.leader_of(rank) != rank:
            return
        node = nodes.node_of[rank]
        coming = [
            files[one.file] for one in plan.passages if nodes.node_of[one.dest] == node
        ]
        if coming:
            directory = self.site.directory
            make_directory(directory)
            for parent in {(directory / record.path).parent for record in coming}:
                make_directory(parent)
            require_space(
                directory,
                file_system_of(directory),
                nbytes=sum(record.nbytes for record in coming),
                n_files=len(coming),
            )

    def between_nodes(
        self, plan: Plan, files: Sequence[FileRecord]
    ) -> Steps[dict[int, str]]:
        """Move files from disk to disk; return the passages that failed here."""
        if all(passage.sender is None for passage in plan.passages):
            return {}
        ferry = Ferry(self.talk, self.tag)
        porter = Porter(
            ferry=ferry,
            activity=Activity(ferry),
            directory=self.site.directory,
            passages=plan.passages,
            files=files,
            rank=self.talk.rank,
        )
        work = self.talk.work(porter.carry, PHASE, moved=porter.activity.moved)
        failed: dict[int, str] = yield from ferry.around(work)
        return failed

    def from_tiers(
        self, plan: Plan, files: Sequence[FileRecord]
    ) -> Steps[dict[int, str]]:
        """Copy files from further tiers; return the passages that failed here."""
        if all(passage.tier is None for passage in plan.passages):
            return {}
        copier = Copier(
            directory=self.site.directory,
            tiers=self.site.tiers,
            passages=plan.passages,
            files=files,
            rank=self.talk.rank,
        )
        return (
            yield from self.talk.work(
                copier.copy, "copy from another tier", moved=lambda: copier.nbytes
            )
        )

    def learn(self, plan: Plan, failed: dict[int, str]) -> Steps[None]:
        """Let all ranks know which sources failed, and what lies where now."""
        packed = json.dumps(sorted(failed.items())).encode()
        gathered = yield from self.talk.gather(packed, PHASE)
        joined = yield from self.talk.on_root(
            lambda: json.dumps([json.loads(one) for one in gathered or ()]).encode(),
            PHASE,
        )
        reasons = {n: why for told in json.loads(joined) for n, why in told}
        nodes = self.site.nodes
        for number, passage in enumerate(plan.passages):
            reason = reasons.get(number)
            if reason is None:
                self.where.nodes[passage.file].add(nodes.node_of[passage.dest])
                self.moved.append(passage)
            elif passage.sender is not None:
                node = nodes.node_of[passage.sender]
                told = f"node {nodes.names[node]}: {reason}"
                self.where.strike(passage.file, told, node=node)
            else:
                self.where.strike(passage.file, reason, tier=passage.tier)

    def nowhere(self, missing: Sequence[int]) -> IncompleteCheckpointError:
        """Return the error for files that no source is left for."""
        file = missing[0]
        path = self.files[file].path
        struck = self.where.struck.get(file, [])
        more = (
            f" and {len(struck) - _MOST_PLACES} more"
            if len(struck) > _MOST_PLACES
            else ""
        )
        reasons = "; ".join(struck[:_MOST_PLACES]) + more
        names = self.site.nodes.names
        places = [f"node {name}" for name in names[:_MOST_PLACES]]
        if len(names) > _MOST_PLACES:
            places.append(f"{len(names) - _MOST_PLACES} more nodes")
        others = f", with {len(missing) - 1} more files" if len(missing) > 1 else ""
        return IncompleteCheckpointError(
            f"{path} of step {self.manifest.step} is nowhere whole{others}. Asked were "
            f"{', '.join([*places, *map(str, self.site.tiers)])}"
            + (f". {reasons}" if reasons else "; none of them has it"),
            path=path,
        )
