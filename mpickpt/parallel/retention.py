"""Removes checkpoints that no rule keeps, and the oldest where the next has no room.

Everything here is local to rank 0, but for `apply`, which spreads the deleting.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from mpickpt.errors import StorageError
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.retention import (
    Candidate,
    KeepPolicy,
    plan_retention,
    plan_room,
)
from mpickpt.storage.catalog import step_path
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.removal import (
    remove_checkpoint,
    remove_directory_if_empty,
    remove_files,
    unpublish,
)
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.run_entry import RunEntry, retention_candidates
from mpickpt.storage.space import space_of

log = logging.getLogger(__name__)

PHASE = "retention"

EARLIER_STEP = -1  # stands for steps of before, whichever they are

_PLENTY_NBYTES = 64 << 20
_BESIDE_SHARDS_NBYTES = 256 << 10  # manifest, layout, receipts


class Retention:
    """Applies to a run the rules by which its checkpoints stay.

    Parameters
    ----------
    run : RunDirectory
        The run.
    keep : KeepPolicy or None
        Which checkpoints stay; None keeps all.
    require_lease : callable
        Called before each removal; raises if another job has become the writer.

    Attributes
    ----------
    good : set of int
        Steps that this run has saved, or loaded and verified.
    untidy : set of int
        Steps of which files may lie about.
    held : callable
        Returns steps that have to stay, since they are being copied to further tiers.
    leads : bool or None
        Whether this rank looks after a directory of its node's own; None where all
        ranks see one directory.
    """

    def __init__(
        self,
        run: RunDirectory,
        keep: KeepPolicy | None,
        require_lease: Callable[[], None],
    ) -> None:
        self.good: set[int] = set()
        self.untidy: set[int] = set()
        self.held: Callable[[], set[int]] = set
        self.leads: bool | None = None
        self._run = run
        self._keep = keep
        self._require_lease = require_lease

    def make_space(self, nbytes: int) -> None:
        """Remove the oldest checkpoints if the next one would not fit otherwise.

        Parameters
        ----------
        nbytes : int
            Bytes of the arrays to come. What files hold besides is known from the last
            checkpoint; a save that is refused for it would be refused for ever.
        """
        if self._keep is None:
            return
        run = self._run.path
        free = space_of(run, file_system_of(run)).room_nbytes
        if free is None or free >= 2 * nbytes + _PLENTY_NBYTES:
            return
        entries = {entry.step: entry for entry in self._run.candidates()}
        likely = max([nbytes, *(entry.nbytes for entry in list(entries.values())[-1:])])
        plan = plan_room(
            self._candidates(entries.values()),
            self._keep,
            needed_nbytes=likely + min(_BESIDE_SHARDS_NBYTES, likely // 8),
            free_nbytes=free,
        )
        for step in plan.remove:
            self._require_lease()
            log.warning("removing step %d, to make room for the next save", step)
            remove_checkpoint(entries[step].path)
            self._run.forget(step)
            self.good.discard(step)

    def apply(self, talk: Conversation, saved: int) -> Steps[None]:
        """Remove what no rule keeps: manifests on rank 0, files spread over ranks.

        Parameters
        ----------
        talk : Conversation
            The ranks.
        saved : int
            The step that was published.

        Notes
        -----
        What cannot be removed is a warning: the new checkpoint is safe. That another
        job has become the writer is an error.
        """
        self.untidy.discard(saved)
        if self._keep is None:
            return
        if self.leads is not None:
            yield from self._apply_on_nodes(talk, leads=self.leads)
            return
        answer = yield from talk.on_root(self._unpublish_old, PHASE)
        directories = json.loads(answer)
        if not directories:
            return
        files = [Path(file) for listed in directories.values() for file in listed]
        mine = files[talk.rank :: talk.size]
        yield from talk.agree(lambda: _remove(mine), PHASE)
        yield from talk.agree(
            lambda: self._remove_directories(talk, directories), PHASE
        )

    def _apply_on_nodes(self, talk: Conversation, *, leads: bool) -> Steps[None]:
        """Remove from each node's disk what no rule keeps, by rank 0's judgement."""
        answer = yield from talk.on_root(self._kept, PHASE)
        kept = json.loads(answer)
        if kept:
            yield from talk.agree(lambda: self._keep_here(kept, leads=leads), PHASE)

    def _kept(self) -> bytes:
        """Return the steps that stay, none where rank 0 cannot tell."""
        assert self._keep is not None
        try:
            verdicts = plan_retention(
                self._candidates(self._run.candidates()), self._keep
            )
        except StorageError as error:
            log.warning("cannot remove old checkpoints: %s", error)
            return b"[]"
        return json.dumps([one.step for one in verdicts if one.keep]).encode()

    def _keep_here(self, kept: Sequence[int], *, leads: bool) -> None:
        """Remove what is older than the last that stays, and does not stay itself.

        A node may have steps of which rank 0 knows nothing, since its own is new.
        """
        self.good.intersection_update(kept)
        try:
            here = self._candidates(self._run.candidates()) if leads else []
        except StorageError as error:
            log.warning("cannot remove old checkpoints: %s", error)
            return
        for one in here:
            step = one.step
            if one.is_pinned or step in kept or step > max(kept):
                continue
            log.info("removing step %d: no rule keeps it", step)
            self._require_lease()
            try:
                remove_checkpoint(step_path(self._run.path, step))
                self._run.forget(step)
            except StorageError as error:
                self.untidy.add(step)
                log.warning("cannot remove step %d: %s", step, error)

    def _candidates(self, entries: Iterable[RunEntry]) -> list[Candidate]:
        """Return the checkpoints; those that have to stay are as good as pinned."""
        held = self.held()
        return [
            replace(one, is_pinned=one.is_pinned or one.step in held)
            for one in retention_candidates(entries, self.good)
        ]

    def _unpublish_old(self) -> bytes:
        listed: dict[str, list[str]] = {}
        try:
            for path, files in self._unpublished():
                listed[str(path)] = [str(file) for file in files]
        except StorageError as error:
            log.warning("cannot remove old checkpoints: %s", error)
        return json.dumps(listed).encode()

    def _unpublished(self) -> Iterator[tuple[Path, list[Path]]]:
        assert self._keep is not None
        entries = {entry.step: entry for entry in self._run.candidates()}
        candidates = self._candidates(entries.values())
        for verdict in plan_retention(candidates, self._keep):
            if verdict.keep:
                continue
            self._require_lease()
            path = self._run.path / entries[verdict.step].path.name
            log.info("removing step %d: %s", verdict.step, verdict.reason)
            try:
                yield path, unpublish(path)
                self._run.forget(verdict.step)
            except StorageError as error:
                self.untidy.add(verdict.step)
                log.warning("cannot remove step %d: %s", verdict.step, error)
            self.good.discard(verdict.step)

    def _remove_directories(
        self, talk: Conversation, directories: dict[str, list[str]]
    ) -> None:
        for path in directories if talk.rank == 0 else ():
            try:
                if not remove_directory_if_empty(Path(path)):
                    self.untidy.add(EARLIER_STEP)
            except StorageError as error:
                self.untidy.add(EARLIER_STEP)
                log.warning("cannot remove %s: %s", path, error)


def _remove(files: Sequence[Path]) -> None:
    try:
        remove_files(files)
    except StorageError as error:
        log.warning("cannot remove a file of an old checkpoint: %s", error)
