"""Finds the newest checkpoint that is whole and loads it: what a restart does."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpickpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
    StorageError,
)
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.load import Load
from mpickpt.parallel.load_call import LoadCall
from mpickpt.parallel.run_keeper import RunKeeper
from mpickpt.parallel.waiting import Steps
from mpickpt.storage.catalog import step_path
from mpickpt.storage.further_tiers import FurtherTiers
from mpickpt.storage.places import Place
from mpickpt.storage.remote_path import parse_place
from mpickpt.storage.run_directory import other_step
from mpickpt.storage.shard_file import is_no_file

log = logging.getLogger(__name__)

PHASE = "restore"

_MOST_LISTINGS = 20

_DAMAGE = (CorruptShardError, IncompleteCheckpointError, ManifestError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a restore gave back.

    Attributes
    ----------
    step : int
        The step that was restored.
    state : tree
        As `load_sharded` returns it.
    manifest : ShardManifest
        Of the checkpoint.
    path : Path or RemotePath
        Its directory.
    rejected : dict of int to str
        Newer steps that were passed over, each with its reason.
    source : str
        What came from which disks or tiers, in words; "" where there is one only.
    """

    step: int
    state: Any
    manifest: ShardManifest
    path: Place
    rejected: dict[int, str]
    source: str = ""


MakeCall = Callable[[Place], LoadCall]


def is_damage(error: CheckpointError) -> bool:
    """Tell whether it is the files that are wrong, so that an older one may do.

    All else is wrong with the call or the file system; an older one would not mend it.
    """
    return isinstance(error, _DAMAGE) or is_no_file(error)


def restore_newest(
    talk: Conversation,
    keeper: RunKeeper,
    make_call: MakeCall,
    *,
    others: FurtherTiers,
    tag: int,
    max_attempts: int,
) -> Steps[Restored | None]:
    """Load the newest checkpoint that is whole; None where there is none at all.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    keeper : RunKeeper
        Of the run directory.
    make_call : callable of Path
        The load of one checkpoint.
    others : FurtherTiers
        The tiers behind the run directory; of a step the nearest that is whole counts.
    tag : int
        Of this load alone.
    max_attempts : int
        Restores without progress after which a step is passed over.

    Raises
    ------
    CheckpointError
        There are checkpoints, but none of them is whole; or an older one would
        have to do while a tier could not be asked for newer ones.
    """
    yield from talk.on_root(keeper.look_for_writer, PHASE)
    for listing in range(1, _MOST_LISTINGS + 1):
        try:
            return (
                yield from _newest_of_those_listed(
                    talk,
                    keeper,
                    make_call,
                    others=others,
                    tag=tag,
                    max_attempts=max_attempts,
                )
            )
        except CheckpointNotFoundError:
            # A job that trains has removed it; then there is a newer one.
            if listing == _MOST_LISTINGS:
                raise
    raise AssertionError("unreachable")


def restore_one(
    talk: Conversation,
    keeper: RunKeeper,
    make_call: MakeCall,
    path: Place,
    *,
    tag: int,
) -> Steps[Restored]:
    """Load one checkpoint, counting the attempt; raise if it is damaged."""
    load = Load(talk, make_call(path), tag)
    manifest = yield from load.receive_manifest()

    def note_attempt() -> bytes:
        if path != step_path(path.parent, manifest.step):
            # To go on from there would set all later steps aside.
            raise ManifestError(other_step(path, manifest.step))
        return keeper.note_attempt(manifest.step)

    yield from talk.on_root(note_attempt, PHASE)
    try:
        state = yield from load.steps()
    except Exception:
        # An error tells of itself; what counts is a program that dies of the step.
        if talk.rank == 0:
            keeper.take_back_attempt(manifest.step)
        raise
    loaded = load.manifest or manifest  # a save may have replaced it meanwhile
    if load.call.verifies_all:
        keeper.retention.good.add(loaded.step)
    return Restored(
        step=loaded.step, state=state, manifest=loaded, path=path, rejected={}
    )


def require_all_asked(refusal: str) -> None:
    """Raise where a tier that did not answer may have a newer checkpoint."""
    if refusal:
        raise StorageError(
            f"no older checkpoint is restored while {refusal}: it may have a newer one"
        )


def nothing_found(run_dir: Path, required: bool | None) -> bytes:
    """Warn that a run starts from nothing, or raise where that must be a mistake.

    For rank 0, whose environment counts.

    Raises
    ------
    CheckpointNotFoundError
        `required`, or None and Slurm says that the job was started before.
    """
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    if required or (required is None and requeued):
        raise CheckpointNotFoundError(
            f"no checkpoint in {run_dir}"
            + (", though this job was requeued" if requeued else "")
            + "; is the run directory mistyped? Pass required=False to start anew"
        )
    log.warning("no checkpoint in %s: starting anew", run_dir)
    return b""


def _newest_of_those_listed(
    talk: Conversation,
    keeper: RunKeeper,
    make_call: MakeCall,
    *,
    others: FurtherTiers,
    tag: int,
    max_attempts: int,
) -> Steps[Restored | None]:
    rejected: dict[int, str] = {}
    listed = yield from talk.on_root(lambda: _newest_first(keeper, others), PHASE)
    failure: CheckpointError | None = None
    candidates, refusal = json.loads(listed)
    for step, path, attempts in candidates:
        if attempts >= max_attempts:
            rejected[step] = f"restored {attempts} times without progress since"
            continue
        if any(newer > step for newer in rejected):
            require_all_asked(refusal)
        try:
            restored = yield from restore_one(
                talk, keeper, make_call, parse_place(path), tag=tag
            )
        except CheckpointError as error:
            if not is_damage(error):
                raise
            failure = error
            rejected[step] = error.message
            if talk.rank == 0:
                log.warning("%s is damaged, trying the next: %s", path, error)
        else:
            return Restored(
                step=restored.step,
                state=restored.state,
                manifest=restored.manifest,
                path=restored.path,
                rejected=rejected,
                source=path if others else "",
            )
    if rejected:
        require_all_asked(refusal)
        raise _none_is_whole(keeper, rejected) from failure
    return None


def _newest_first(keeper: RunKeeper, others: FurtherTiers) -> bytes:
    """Return steps, places and attempts: the highest step first, the nearest place.

    And which tiers could not be asked.
    """
    places: dict[int, list[Place]] = {e.step: [e.path] for e in keeper.look()}
    for step, further in others.published().items():
        places[step] = [*places.get(step, []), *further]
    listed = [
        (step, str(place), keeper.run.attempts(step))
        for step in sorted(places, reverse=True)
        for place in places[step]
    ]
    return json.dumps([listed, "; ".join(others.refusals.values())]).encode()


def _none_is_whole(keeper: RunKeeper, rejected: dict[int, str]) -> CheckpointError:
    reasons = "; ".join(f"step {step}: {why}" for step, why in rejected.items())
    return IncompleteCheckpointError(
        f"none of the {len(rejected)} checkpoints in {keeper.run.path} can be "
        f"restored: {reasons}. Nothing was changed; restore(step) tries one of them "
        "whatever was tried before",
        path=str(keeper.run.path),
    )
