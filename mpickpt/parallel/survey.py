"""Finds out what the nodes of a job have of a run, on their own disks and further on.

The lowest rank of each node looks at its disk, rank 0 puts together what they tell and
looks at the further tiers. Names and sizes are looked at; digests are compared when
files are used.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from mpickpt.errors import CheckpointError, CheckpointNotFoundError, ManifestError
from mpickpt.format.local_tier import TIER_FIELD
from mpickpt.format.manifest import parse_manifest
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.node_map import KEY_NBYTES, NodeMap, map_nodes, pack_node_record
from mpickpt.planning.sights import LocalCheckpoint, NodeSight, Sights
from mpickpt.planning.sources import Whereabouts
from mpickpt.storage.catalog import read_manifest_text, step_path
from mpickpt.storage.further_tiers import FurtherTiers
from mpickpt.storage.node_disk import node_name
from mpickpt.storage.node_sight import look_at_run
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.shared_mark import own_view

log = logging.getLogger(__name__)

PHASE = "look at all nodes"

T = TypeVar("T")


def meet_nodes(talk: Conversation, run_dir: Path) -> Steps[NodeMap]:
    """Return which ranks are on which node: they see the same files at one path.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    run_dir : Path
        The run directory that this rank calls its node's own.
    """
    resolved = os.fsencode(os.path.realpath(run_dir))
    path = hashlib.sha256(resolved).digest()[:KEY_NBYTES]
    record = pack_node_record(own_view(), path, node_name())
    return map_nodes((yield from talk.allgather(record, PHASE)))


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that may be restored.

    Attributes
    ----------
    checkpoint_id, created_at : str
        As its manifest says.
    nodes : list of int
        The nodes that have the manifest.
    tiers : list of int
        The further tiers that have it.
    """

    checkpoint_id: str
    created_at: str
    nodes: list[int]
    tiers: list[int]


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose manifest is not on all nodes that have shards of it.

    Attributes
    ----------
    step : int
        The step.
    offer : Offer
        Who has the manifest.
    nodes : list of int
        The nodes that lack it, or have it damaged.
    """

    step: int
    offer: Offer
    nodes: list[int]


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that may be restored.

    Attributes
    ----------
    steps : list of (int, int)
        The highest first, each with how often its restore was begun without progress.
    refusal : str
        Why some tier could not be asked; "" if all could.
    """

    steps: list[tuple[int, int]]
    refusal: str


class _Places(msgspec.Struct, frozen=True, kw_only=True):
    nodes: list[list[int]]
    tiers: list[list[int]]


class Survey:
    """What the nodes of a job have together.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    nodes : NodeMap
        Their nodes.
    run : RunDirectory
        The one on this rank's node.
    tiers : FurtherTiers
        What lies behind; rank 0 alone asks.

    Notes
    -----
    All methods that return steps are collective.
    """

    def __init__(
        self, talk: Conversation, nodes: NodeMap, run: RunDirectory, tiers: FurtherTiers
    ) -> None:
        self.talk = talk
        self.nodes = nodes
        self.run = run
        self.tiers = tiers
        self._sights: Sights | None = None  # of rank 0
        self._texts: dict[int, bytes] = {}  # of rank 0: manifests by tier

    @property
    def leads(self) -> bool:
        """Whether this rank looks after the disk of its node."""
        return self.nodes.leader_of(self.talk.rank) == self.talk.rank

    def look(self) -> Steps[None]:
        """Look at the disks of all nodes."""
        sight = yield from self.talk.work(
            lambda _cancelled: look_at_run(self.run) if self.leads else None,
            PHASE,
            moved=lambda: None,  # to list a few directories takes no time-out
        )
        gathered = yield from self.talk.gather(
            b"" if sight is None else sight.encode(), PHASE
        )
        if gathered is not None:
            seen = [NodeSight.decode(gathered[rank]) for rank in self.nodes.leaders]
            for name, one in zip(self.nodes.names, seen, strict=True):
                if one.problem:
                    log.warning("the disk of node %s is no use: %s", name, one.problem)
            self._sights = Sights(seen)

    def listing(self) -> Steps[Listing]:
        """Return the steps that any node or tier has."""

        def listed(sights: Sights) -> Listing:
            steps = {*sights.steps(), *self.tiers.published()}
            return Listing(
                steps=[(n, sights.attempts(n)) for n in sorted(steps, reverse=True)],
                refusal="; ".join(self.tiers.refusals.values()),
            )

        return (yield from self._from_root(listed, Listing))

    def offers(self, step: int) -> Steps[list[Offer]]:
        """Return the checkpoints of a step, the one that was saved last first.

        Raises
        ------
        CheckpointNotFoundError, ManifestError
            There is none, or none whose manifest can be read.
        """

        def offered(sights: Sights) -> list[Offer]:
            found = {
                one.checkpoint_id: _offer_of(one, one.published)
                for one in sights.checkpoints(step)
            }
            self._texts = self.tiers.manifests(step)
            for tier, text in self._texts.items():
                manifest = parse_manifest(text, where="")
                offer = found.setdefault(
                    manifest.checkpoint_id, _offer_of(manifest, ())
                )
                offer.tiers.append(tier)
            if not found:
                self._raise_not_found(sights, step)
            return sorted(found.values(), key=lambda one: one.created_at, reverse=True)

        return (yield from self._from_root(offered, list[Offer]))

    def manifest(self, step: int, offer: Offer) -> Steps[ShardManifest | None]:
        """Return the manifest of a checkpoint; None if it has gone meanwhile."""
        for node in offer.nodes:
            text = yield from self._from_node(step, offer.checkpoint_id, node)
            if text:
                return _whole(parse_manifest(text, where=MANIFEST_NAME))
        own = self._texts.get(offer.tiers[0]) if offer.tiers else None
        text = yield from self.talk.bcast(own or b"", PHASE)
        return _whole(parse_manifest(text, where=MANIFEST_NAME)) if text else None

    def whereabouts(self, manifest: ShardManifest, offer: Offer) -> Steps[Whereabouts]:
        """Return where each file of a checkpoint is, as far as names and sizes tell."""

        def found(sights: Sights) -> _Places:
            missing = self.tiers.missing_in(manifest, offer.tiers)
            where = sights.whereabouts(manifest, missing)
            return _Places(nodes=list(map(sorted, where.nodes)), tiers=where.tiers)

        places = yield from self._from_root(found, _Places)
        return Whereabouts(nodes=list(map(set, places.nodes)), tiers=places.tiers)

    def gaps(self) -> Steps[list[Gap]]:
        """Return the checkpoints whose manifest some node lacks that has shards."""

        def found(sights: Sights) -> list[Gap]:
            return [
                Gap(
                    step=step,
                    offer=_offer_of(one, one.published),
                    nodes=list(one.lacking),
                )
                for step in sights.steps()
                for one in sights.checkpoints(step)
                if one.lacking
            ]

        return (yield from self._from_root(found, list[Gap]))

    def _from_root(self, call: Callable[[Sights], T], kind: type[T]) -> Steps[T]:
        def on_root() -> bytes:
            assert self._sights is not None
            return msgspec.msgpack.encode(call(self._sights))

        answer = yield from self.talk.on_root(on_root, PHASE)
        return msgspec.msgpack.decode(answer, type=kind)

    def _from_node(self, step: int, checkpoint_id: str, node: int) -> Steps[bytes]:
        """Return the manifest of a checkpoint that a node has, b"" if it has gone."""
        leader = self.nodes.leaders[node]
        text = b""
        if self.talk.rank == leader:
            directory = step_path(self.run.path, step)
            try:
                found = read_manifest_text(directory)
                manifest = parse_manifest(found, where=str(directory / MANIFEST_NAME))
                text = found if manifest.checkpoint_id == checkpoint_id else b""
            except CheckpointError as error:
                log.warning("%s is passed over: %s", directory, error)
        return (yield from self.talk.bcast(text, PHASE, leader))

    def _raise_not_found(self, sights: Sights, step: int) -> None:
        problems = sights.problems(step)
        if problems:
            told = "; ".join(
                f"node {self.nodes.names[node]}: {why}"
                for node, why in problems.items()
            )
            raise ManifestError(told)
        places = [
            f"{self.run.path} of any node",
            *map(str, self.tiers.directories(step)),
        ]
        raise CheckpointNotFoundError(
            f"no checkpoint of step {step} in {', '.join(places)}"
        )


def _whole(manifest: ShardManifest) -> ShardManifest:
    """Return a manifest that does not say what lies on the node it was read on."""
    extra = {name: told for name, told in manifest.extra.items() if name != TIER_FIELD}
    return msgspec.structs.replace(manifest, extra=extra)


def _offer_of(one: ShardManifest | LocalCheckpoint, nodes: Sequence[int]) -> Offer:
    return Offer(
        checkpoint_id=one.checkpoint_id,
        created_at=one.created_at,
        nodes=list(nodes),
        tiers=[],
    )
