"""Gives checkpoints their manifest on the disks of nodes that lack it.

Without one a node takes its shards for rubbish, though other nodes still count on them.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mpickpt.errors import CheckpointError, StorageError
from mpickpt.format.local_tier import for_node, with_local_tier
from mpickpt.format.manifest import dump_manifest
from mpickpt.format.naming import parse_shard_name
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.survey import Survey
from mpickpt.parallel.waiting import Steps
from mpickpt.storage.catalog import read_manifest, step_path
from mpickpt.storage.commit import make_directory
from mpickpt.storage.manifest_publishing import publish_manifest
from mpickpt.storage.node_sight import ranks_here
from mpickpt.storage.removal import own_files

log = logging.getLogger(__name__)

PHASE = "publish on all nodes"

Ranks = Mapping[str, Sequence[int]]


def mend_manifests(survey: Survey) -> Steps[None]:
    """Give every checkpoint its manifest on each node that has shards of it.

    Notes
    -----
    Collective. What a node's disk refuses is logged: the restore may do without.
    """
    for gap in (yield from survey.gaps()):
        manifest = yield from survey.manifest(gap.step, gap.offer)
        if manifest is not None and _is_among(survey, gap.nodes):
            directory = step_path(survey.run.path, gap.step)
            here = {_own_name(survey): ranks_here(directory, manifest)}
            try:
                _publish(directory, manifest, _own_name(survey), here, {})
            except StorageError as error:
                log.warning("%s has shards, but no manifest: %s", directory, error)


def make_way(survey: Survey, manifest: ShardManifest) -> Steps[None]:
    """Set aside another checkpoint of the same step that a node holds.

    A node that was away while the step was saved once more has one. Where it holds
    shards of the newer one too, that was about to replace it.
    """

    def make() -> None:
        directory = step_path(survey.run.path, manifest.step)
        try:
            other = read_manifest(directory)
        except CheckpointError:
            return
        if other.checkpoint_id == manifest.checkpoint_id:
            return
        names = [parse_shard_name(path.name) for path in own_files(directory)]
        if not any(name is not None and name.id8 == manifest.id8 for name in names):
            survey.run.reject(manifest.step, "this step was saved once more since")

    yield from survey.talk.agree(lambda: make() if survey.leads else None, PHASE)


def publish_on_nodes(
    survey: Survey,
    manifest: ShardManifest,
    nodes: Collection[int],
    ranks: tuple[Ranks, Ranks],
) -> Steps[None]:
    """Publish a checkpoint on the disks of some nodes, with what lies on each now.

    Parameters
    ----------
    survey : Survey
        Of the ranks.
    manifest : ShardManifest
        Of the checkpoint; all its files lie somewhere.
    nodes : collection of int
        Which nodes get it.
    ranks : (mapping, mapping) of str to sequence of int
        For each node, whose shards are at home there, and whose are kept besides.
    """
    directory = step_path(survey.run.path, manifest.step)

    def publish() -> None:
        if _is_among(survey, nodes):
            make_directory(directory)
            _publish(directory, manifest, _own_name(survey), *ranks)

    if nodes:
        yield from survey.talk.agree(publish, PHASE)


def _publish(
    directory: Path, manifest: ShardManifest, name: str, nodes: Ranks, copies: Ranks
) -> None:
    told = with_local_tier(manifest, nodes=nodes, copies=copies)
    publish_manifest(directory, dump_manifest(for_node(told, name)))


def _is_among(survey: Survey, nodes: Collection[int]) -> bool:
    return survey.leads and survey.nodes.node_of[survey.talk.rank] in nodes


def _own_name(survey: Survey) -> str:
    return survey.nodes.name_of(survey.talk.rank)
