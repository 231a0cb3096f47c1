"""Loads one checkpoint from the disks of the nodes, having brought what they lack.

A file that turns out damaged while it is read is brought again from another source, in
its place, and the load starts again: it is whole there the next time.
"""

import errno
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

from mpickpt.errors import (
    CheckpointError,
    CorruptShardError,
    IncompleteCheckpointError,
    StorageError,
)
from mpickpt.format.naming import parse_layout_name, parse_shard_name
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.bringing import Bringing, Site
from mpickpt.parallel.load import Load
from mpickpt.parallel.load_call import LoadCall
from mpickpt.parallel.node_publishing import make_way, publish_on_nodes
from mpickpt.parallel.survey import Offer, Survey
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.load_plan import assign_shards
from mpickpt.planning.sources import (
    Whereabouts,
    needs_of_load,
    ranks_by_node,
    sources_said,
)
from mpickpt.storage.catalog import step_path
from mpickpt.storage.places import Place
from mpickpt.storage.shard_file import is_no_file

log = logging.getLogger(__name__)

# A disk on which a file is damaged again, once it was replaced, is no use.
_MOST_REPAIRS = 2


class LocalLoad:
    """One load of a checkpoint that the nodes have together.

    Parameters
    ----------
    survey : Survey
        Of the ranks.
    call : LoadCall
        What is loaded into; its directory is the one of this rank's node.
    manifest : ShardManifest
        Of the checkpoint.
    offer : Offer
        Who has the manifest.
    where : Whereabouts
        Who has which files; the same on all ranks.
    tag : int
        Of this restore alone.

    Attributes
    ----------
    directory : Path or RemotePath
        What is loaded from: on this node's disk, or in a further tier where a disk
        takes nothing.
    source : str
        Once it is loaded: what came from where, in words.
    """

    def __init__(
        self,
        survey: Survey,
        call: LoadCall,
        manifest: ShardManifest,
        offer: Offer,
        where: Whereabouts,
        *,
        tag: int,
    ) -> None:
        self.source = ""
        self._survey = survey
        self._call = call
        self._manifest = manifest
        self._offer = offer
        self._tag = tag
        self._readers = assign_shards(
            [shard.nbytes for shard in manifest.shards],
            survey.talk.size,
            holders=where.nodes,
            node_of=survey.nodes.node_of,
        )
        self._needs = needs_of_load(self._readers, manifest)
        self._repairs: Counter[tuple[int, int]] = Counter()
        self._published = set(offer.nodes)
        self.directory: Place = step_path(survey.run.path, manifest.step)
        self._bringing = Bringing(
            talk=survey.talk,
            site=Site(
                nodes=survey.nodes,
                directory=step_path(survey.run.path, manifest.step),
                tiers=survey.tiers.directories(manifest.step),
            ),
            manifest=manifest,
            where=where,
            tag=tag,
        )

    @property
    def is_straight(self) -> bool:
        """Whether it is loaded from a further tier, with nothing brought."""
        return self.directory != self._bringing.site.directory

    def prepare(self) -> Steps[None]:
        """Bring what the nodes lack; durable when it returns.

        Raises
        ------
        IncompleteCheckpointError
            No source is left for some file.
        StorageError
            A node's disk takes nothing, and no further tier has the checkpoint.
        """
        try:
            yield from self.bring()
        except StorageError as error:
            if not self._offer.tiers:
                raise
            self.directory = self._bringing.site.tiers[self._offer.tiers[0]]
            if self._survey.talk.rank == 0:
                log.warning("loading straight from %s: %s", self.directory, error)

    def steps(self) -> Steps[Any]:
        """Load what was prepared, from other sources where some turn out damaged.

        Raises
        ------
        CheckpointError
            As `load_sharded`.
        """
        while True:
            try:
                state = yield from self.load()
            except CheckpointError as error:
                if not self.learn(error):
                    raise
                failure = error
            else:
                self.say_source()
                return state
            if self._survey.talk.rank == 0:
                log.warning("looking for another source: %s", failure)
            yield from self.bring()

    def bring(self) -> Steps[None]:
        """Bring what the nodes lack, and publish the checkpoint where it is new."""
        yield from make_way(self._survey, self._manifest)
        bringing, nodes = self._bringing, self._survey.nodes
        n_before = len(bringing.moved)
        yield from bringing.steps(self._needs)
        changed = {nodes.node_of[one.dest] for one in bringing.moved[n_before:]}
        changed |= set(range(nodes.n_nodes)) - self._published
        ranks = ranks_by_node(bringing.where, nodes, self._readers)
        yield from publish_on_nodes(self._survey, self._manifest, changed, ranks)
        self._published |= changed

    def load(self) -> Steps[Any]:
        """Load from this node's disk, or straight from a tier."""
        talk, call = self._survey.talk, self._call
        load = Load(talk, replace(call, directory=self.directory), self._tag)
        load.readers = self._readers
        return (yield from load.load(self._manifest))

    def learn(self, failure: CheckpointError) -> bool:
        """Note which files were missing or damaged where; tell whether that helps.

        All ranks have the same failure, and so learn the same.
        """
        helps = False
        if self.is_straight:
            return helps
        nodes, where = self._survey.nodes, self._bringing.where
        failures: dict[int, CheckpointError] = failure.failures or {0: failure}
        for rank, error in failures.items():
            file = self.file_of(error)
            if file is None:
                continue
            node = nodes.node_of[rank]
            if node in where.nodes[file]:
                if self._repairs[file, node] >= _MOST_REPAIRS:
                    return False
                self._repairs[file, node] += 1
                told = f"node {nodes.names[node]}: {error.message}"
                where.strike(file, told, node=node)
            self._needs = [*self._needs, (file, rank)]
            helps = True
        return helps

    def file_of(self, error: CheckpointError) -> int | None:
        """Return the number of the file that an error is about, None if it is none."""
        is_damage = isinstance(error, CorruptShardError | IncompleteCheckpointError)
        if not is_damage and not is_no_file(error) and not _is_unreadable(error):
            return None
        name = str(getattr(error, "path", None) or "").rpartition("/")[2]
        shard, layout = parse_shard_name(name), self._manifest.layout
        if shard is not None and shard.rank < self._manifest.world_size:
            path = self._manifest.shards[shard.rank].path
            return shard.rank if path.rpartition("/")[2] == name else None
        if parse_layout_name(name) and layout is not None and layout.path == name:
            return self._manifest.world_size
        return None

    def say_source(self) -> None:
        """Tell what came from where."""
        if self.is_straight:
            size = self._manifest.world_size
            self.source = f"all {size} shards straight from {self.directory}"
            return
        shards = [need for need in self._needs if need[0] < self._manifest.world_size]
        tiers = list(map(str, self._bringing.site.tiers))
        self.source = sources_said(
            shards, self._bringing.moved, self._survey.nodes, tiers
        )


def _is_unreadable(error: CheckpointError) -> bool:
    """Tell whether a disk cannot read a file any more."""
    return isinstance(error, StorageError) and error.errno == errno.EIO
