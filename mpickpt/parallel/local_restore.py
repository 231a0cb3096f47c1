"""Restores a run whose newest checkpoints lie on the disks of its nodes.

Each shard comes from the nearest place that has it whole: the disk of the node that
reads it, another node's, or a further tier.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpickpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
)
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.communicators import Conversations
from mpickpt.parallel.load import Load, next_tag
from mpickpt.parallel.load_call import LoadCall, load_call
from mpickpt.parallel.local_load import LocalLoad
from mpickpt.parallel.node_publishing import mend_manifests
from mpickpt.parallel.restore import (
    Restored,
    is_damage,
    nothing_found,
    require_all_asked,
)
from mpickpt.parallel.run_keeper import RunKeeper
from mpickpt.parallel.run_restorer import RunRestorer
from mpickpt.parallel.survey import Offer, Survey, meet_nodes
from mpickpt.parallel.waiting import Steps, run
from mpickpt.planning.node_map import NodeMap
from mpickpt.planning.tiers import LocalTier
from mpickpt.storage.catalog import step_path
from mpickpt.storage.further_tiers import FurtherTiers
from mpickpt.storage.places import Place

log = logging.getLogger(__name__)

PHASE = "restore"


class LocalRestorer:
    """Restores steps of a run whose first tier is the disk of each node.

    Parameters
    ----------
    talks : Conversations
        The ranks.
    keeper : RunKeeper
        Of the run directory on this rank's node. Used on the lowest rank of each node.
    template : str
        The path of the run directory as all ranks were given it.
    others : sequence of Path or RemotePath
        The run in the further tiers, the nearest first.
    state, max_attempts
        As in `CheckpointManager`.
    """

    def __init__(
        self,
        talks: Conversations,
        keeper: RunKeeper,
        *,
        template: str,
        others: Sequence[Place] = (),
        state: Callable[[], Any],
        max_attempts: int,
    ) -> None:
        self._talks = talks
        self._keeper = keeper
        self._template = template
        self._others = others
        self._state = state
        self._max_attempts = max_attempts
        self._nodes: NodeMap | None = None

    def newest(self, required: bool | None, **options: Any) -> Restored | None:
        """Load the newest checkpoint of which every shard has some source.

        Raises
        ------
        CheckpointError
            There are checkpoints, but none of them is whole; or an older one would
            have to do while a tier could not be asked for newer ones.
        """
        restored = run(self._newest(options))
        if restored is None:
            place = Path(self._template)
            told = (lambda: nothing_found(place, required), PHASE)
            run(self._talks.load.on_root(*told))
        return restored

    def one(self, step: int, **options: Any) -> Restored:
        """Load the checkpoint of a step."""
        return run(self._one(step, options))

    def on_each_node(self, call: Callable[[], object], phase: str) -> Steps[None]:
        """Call on the lowest rank of each node; an error there is every rank's."""
        nodes = yield from self._meet()
        rank = self._talks.load.rank
        leads = nodes.leader_of(rank) == rank
        yield from self._talks.load.agree(lambda: call() if leads else None, phase)

    def leads(self) -> Steps[bool]:
        """Tell whether this rank looks after its node's run directory; collective."""
        nodes = yield from self._meet()
        rank = self._talks.load.rank
        return nodes.leader_of(rank) == rank

    def _meet(self) -> Steps[NodeMap]:
        if self._nodes is None:
            self._nodes = yield from meet_nodes(self._talks.load, self._keeper.run.path)
        return self._nodes

    def _surveyed(self) -> Steps[Survey]:
        yield from self.on_each_node(self._keeper.look_for_writer, PHASE)
        survey = Survey(
            self._talks.load,
            (yield from self._meet()),
            self._keeper.run,
            FurtherTiers(self._others),
        )
        yield from survey.look()
        yield from mend_manifests(survey)
        return survey

    def _newest(self, options: dict[str, Any]) -> Steps[Restored | None]:
        survey = yield from self._surveyed()
        listing = yield from survey.listing()
        rejected: dict[int, str] = {}
        failure: CheckpointError | None = None
        for step, attempts in listing.steps:
            if attempts >= self._max_attempts:
                rejected[step] = f"restored {attempts} times without progress since"
                continue
            if rejected:
                require_all_asked(listing.refusal)
            try:
                restored = yield from self._restore(survey, step, options)
            except CheckpointError as error:
                if not is_damage(error):
                    raise
                failure = error
                rejected[step] = error.message
                if survey.talk.rank == 0:
                    log.warning("step %d is damaged, trying an older: %s", step, error)
            else:
                return replace(restored, rejected=rejected)
        require_all_asked(listing.refusal)
        if rejected:
            raise self._none_is_whole(rejected) from failure
        return None

    def _one(self, step: int, options: dict[str, Any]) -> Steps[Restored]:
        survey = yield from self._surveyed()
        yield from survey.listing()
        return (yield from self._restore(survey, step, options))

    def _restore(
        self, survey: Survey, step: int, options: dict[str, Any]
    ) -> Steps[Restored]:
        """Restore the checkpoint of a step that was saved last and has all shards."""
        failure: CheckpointError | None = None
        for offer in (yield from survey.offers(step)):
            try:
                return (yield from self._take(survey, step, offer, options))
            except CheckpointError as error:
                if not is_damage(error):
                    raise
                failure = failure or error
        raise failure or CheckpointNotFoundError(f"step {step} was removed meanwhile")

    def _take(
        self, survey: Survey, step: int, offer: Offer, options: dict[str, Any]
    ) -> Steps[Restored]:
        manifest = yield from survey.manifest(step, offer)
        if manifest is None:
            raise CheckpointNotFoundError(f"step {step} was removed meanwhile")
        call = yield from self._checked_call(survey, manifest, options)
        where = yield from survey.whereabouts(manifest, offer)
        tag = next_tag(self._talks.memory)
        load = LocalLoad(survey, call, manifest, offer, where, tag=tag)
        yield from self.on_each_node(lambda: self._keeper.note_attempt(step), PHASE)
        try:
            yield from load.prepare()
            # What was just published here is nothing that another job has saved.
            yield from self.on_each_node(self._keeper.look, PHASE)
            state = yield from load.steps()
        except Exception:
            # An error tells of itself; what counts is a program that dies of the step.
            self._keeper.take_back_attempt(step)
            raise
        if call.verifies_all:
            self._keeper.retention.good.add(step)
        if survey.talk.rank == 0:
            log.info("restored step %d: %s", step, load.source)
        return Restored(
            step=step,
            state=state,
            manifest=manifest,
            path=load.directory,
            rejected={},
            source=load.source,
        )

    def _checked_call(
        self, survey: Survey, manifest: ShardManifest, options: dict[str, Any]
    ) -> Steps[LoadCall]:
        """Return the load from this node's disk, on which all ranks agree."""

        def state_of(_manifest: ShardManifest) -> Any:
            return self._state()

        asked = step_path(Path(self._template), manifest.step)
        load = Load(survey.talk, load_call(asked, like=state_of, **options), tag=0)
        yield from load.agree_on_call()
        load.call.require_world_size(manifest.world_size, survey.talk.size)
        own = step_path(self._keeper.run.path, manifest.step)
        return replace(load.call, directory=own)

    def _none_is_whole(self, rejected: dict[int, str]) -> CheckpointError:
        reasons = "; ".join(f"step {step}: {why}" for step, why in rejected.items())
        places = ", ".join([f"{self._template} of any node", *map(str, self._others)])
        return IncompleteCheckpointError(
            f"none of the {len(rejected)} checkpoints in {places} can be restored: "
            f"{reasons}. Nothing was set aside; restore(step) tries one of them "
            "whatever was tried before",
            path=self._template,
        )


def restorer_of(
    talks: Conversations,
    keeper: RunKeeper,
    local: LocalTier | None,
    others: Sequence[Place],
    *,
    state: Callable[[], Any],
    max_attempts: int,
) -> RunRestorer | LocalRestorer:
    """Return what restores a run whose first tier is one directory, or each node's.

    Parameters
    ----------
    talks, keeper, others, state, max_attempts
        As in `LocalRestorer`.
    local : LocalTier or None
        The first tier, if it is the disk of each node.
    """
    if local is None:
        return RunRestorer(
            talks, keeper, others=others, state=state, max_attempts=max_attempts
        )
    return LocalRestorer(
        talks,
        keeper,
        template=os.fspath(local.path),
        others=others,
        state=state,
        max_attempts=max_attempts,
    )
