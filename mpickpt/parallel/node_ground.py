"""Writes each shard to the disk of its rank's node, and publishes on all nodes.

The lowest rank of a node, its leader, makes room there and publishes there. Each node
gets the manifest, so that the checkpoint is found as long as one of them is left.
"""

import hashlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mpickpt.errors import CollectiveTimeoutError, StorageError
from mpickpt.format.local_tier import for_node, with_local_tier
from mpickpt.format.manifest import dump_manifest, parse_manifest
from mpickpt.format.naming import (
    MANIFEST_NAME,
    MANIFEST_TMP_NAME,
    parse_layout_name,
)
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.describe import Description, SaveMemory
from mpickpt.parallel.ground import (
    MakeManifest,
    WrittenFile,
    demand_of,
    sweep_replaced,
)
from mpickpt.parallel.line import ROOT
from mpickpt.parallel.partners import announce_copies, move_copies
from mpickpt.parallel.save_call import SaveCall
from mpickpt.parallel.survey import meet_nodes
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.partners import PartnerPlan, plan_partners
from mpickpt.storage.catalog import step_path
from mpickpt.storage.checkpoint_writer import stage_checkpoint
from mpickpt.storage.commit import discard
from mpickpt.storage.manifest_publishing import (
    StagedManifest,
    publish_staged_manifest,
    withdraw_manifest,
)
from mpickpt.storage.node_disk import OwnDisk, own_directory
from mpickpt.storage.room import Room, make_room, remove_if_empty

PREPARE, PUBLISH = "prepare", "publish"


class NodeGround:
    """A directory on each node's disk.

    Parameters
    ----------
    template : path-like
        The run directory; see `node_disk.own_directory`.
    step : int
        The step that is saved.
    copies : {0, 1}
        1 keeps each shard also on another node.

    Raises
    ------
    ValueError
        A variable in the template is not set on this rank.
    """

    def __init__(
        self, template: str | os.PathLike[str], step: int, *, copies: int
    ) -> None:
        self.run_dir = own_directory(template)
        self.directory = step_path(self.run_dir, step)
        self.name = str(step_path(template, step))
        self.keeps_copies = bool(copies)
        self.room: Room | None = None
        self.may_be_published = False
        self._partners: PartnerPlan | None = None
        self._copies: list[Path] = []
        self._has_made_room = False
        self._before_publish: Callable[[], None] = _let_pass

    @property
    def partners(self) -> PartnerPlan:
        """Which shards lie on which node; known once the ground is prepared."""
        assert self._partners is not None
        return self._partners

    def prepare(
        self,
        talk: Conversation,
        memory: SaveMemory,
        call: SaveCall,
        description: Description,
    ) -> Steps[None]:
        """Have the leaders make directories and look for room, each on its node."""
        self._before_publish = call.before_publish
        nodes = yield from meet_nodes(talk, self.run_dir)
        self._partners = plan_partners(
            nodes, description.nbytes_by_rank.tolist(), copies=int(self.keeps_copies)
        )
        drawn = yield from talk.on_root(_new_id, PREPARE)
        room = yield from talk.agree(
            lambda: self._make_room(talk, call, description, drawn.decode()), PREPARE
        )
        if memory.apart != nodes:
            yield from self._require_apart(talk, drawn)
            memory.apart = nodes
        messages = {} if room is None else dict.fromkeys(self._around(talk), room)
        [message] = (yield from talk.exchange(messages, PREPARE)).values()
        self.room = Room.decode(message)

    def copy(self, talk: Conversation, files: Sequence[WrittenFile]) -> Steps[None]:
        """Have a rank of another node write the files of this one as well."""
        target = self.partners.target_of[talk.rank]
        coming = yield from announce_copies(talk, target, files)
        # Not the layout file: an older checkpoint's may have its name. Sweeps know.
        self._copies = [
            self.directory / one.path
            for one in coming.values()
            if parse_layout_name(one.path) is None
        ]
        yield from move_copies(talk, self.directory, target, files, coming)

    def send_receipts(self, rank: int) -> None:
        """Nobody publishes before all leaders are ready to."""

    def publish(
        self, talk: Conversation, make_manifest: MakeManifest, *, overwrite: bool
    ) -> Steps[None]:
        """Have the leaders rename the manifest, once all of them have it ready."""
        nodes, copies = self.partners.nodes, self.partners.copies_by_name()

        def make() -> bytes:
            made = make_manifest()
            placed = with_local_tier(made, nodes=nodes.ranks_by_name(), copies=copies)
            return dump_manifest(placed)

        content = yield from talk.on_root(make, PUBLISH)
        # From here on: another leader may see that all are ready while this rank waits.
        self.may_be_published = True
        staged = yield from talk.agree(lambda: self._stage(talk, content), PUBLISH)
        try:
            yield from talk.agree(lambda: _publish(staged), PUBLISH)
        except CollectiveTimeoutError:
            raise
        except Exception as failure:
            yield from self._take_back(talk, staged, failure)
            raise
        if overwrite and self._has_made_room:
            sweep_replaced(self.directory)

    def clear(self, talk: Conversation) -> None:
        """Remove the copies that this rank has written; leaders: what is left."""
        for path in self._copies:
            discard(path)
        if self._has_made_room:
            discard(self.directory / MANIFEST_TMP_NAME)
            sweep_replaced(self.directory)
            remove_if_empty(self.directory, talk.size)

    def _make_room(
        self,
        talk: Conversation,
        call: SaveCall,
        description: Description,
        save_id: str,
    ) -> bytes | None:
        nodes = self.partners.nodes
        if nodes.leader_of(talk.rank) != talk.rank:
            return None
        here = self.partners.shards_on(nodes.node_of[talk.rank])
        nbytes = int(description.nbytes_by_rank[here].sum())
        demand = demand_of(call, talk.size, nbytes, known_shared=True)
        room = make_room(
            self.directory,
            replace(demand, n_shards=len(here)),
            claim=call.check_launcher if talk.rank == ROOT else _let_pass,
            make_space=call.make_space,
            save_id=save_id,
        )
        self._has_made_room = True
        return room.encode()

    def _require_apart(self, talk: Conversation, save_id: bytes) -> Steps[None]:
        """Raise unless each node has a directory of its own, as it says."""
        nodes = self.partners.nodes
        if nodes.n_nodes == 1:
            return
        node = nodes.node_of[talk.rank].to_bytes(8, "big")
        token = hashlib.sha256(save_id + node).hexdigest()[: len(save_id)]
        disk = OwnDisk(self.directory, token) if self._has_made_room else None
        try:
            yield from talk.agree(disk.mark if disk else _let_pass, PREPARE)
            yield from talk.agree(disk.require_alone if disk else _let_pass, PREPARE)
        finally:
            if disk is not None:
                disk.unmark()

    def _around(self, talk: Conversation) -> list[int]:
        """Return the ranks on this rank's node."""
        nodes = self.partners.nodes
        return nodes.ranks_on(nodes.node_of[talk.rank])

    def _stage(self, talk: Conversation, content: bytes) -> StagedManifest | None:
        if not self._has_made_room:
            return None
        if talk.rank != ROOT:  # which has asked before it made the manifest
            self._before_publish()
        manifest = parse_manifest(content, where=str(self.directory / MANIFEST_NAME))
        name = self.partners.nodes.name_of(talk.rank)
        return stage_checkpoint(self.directory, for_node(manifest, name))

    def _take_back(
        self, talk: Conversation, staged: StagedManifest | None, failure: Exception
    ) -> Steps[None]:
        """Take the manifest from all nodes, for it is not on all."""

        def withdraw() -> None:
            if staged is not None:
                withdraw_manifest(staged, _as_storage_error(failure))

        yield from talk.agree(withdraw, PUBLISH)


def _publish(staged: StagedManifest | None) -> None:
    if staged is not None:
        publish_staged_manifest(staged)


def _as_storage_error(failure: Exception) -> StorageError:
    return failure if isinstance(failure, StorageError) else StorageError(str(failure))


def _new_id() -> bytes:
    return secrets.token_hex(16).encode()


def _let_pass() -> None:
    pass
