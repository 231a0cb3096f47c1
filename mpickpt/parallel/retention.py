"""Removes checkpoints that no rule keeps, and the oldest where the next has no room.

Everything here is local to rank 0, but for `apply`, which spreads the deleting.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mpickpt.errors import StorageError
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.retention import KeepPolicy, plan_retention, plan_room
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.removal import (
    remove_checkpoint,
    remove_directory_if_empty,
    remove_files,
    unpublish,
)
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.run_entry import retention_candidates
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
    """

    def __init__(
        self,
        run: RunDirectory,
        keep: KeepPolicy | None,
        require_lease: Callable[[], None],
    ) -> None:
        self.good: set[int] = set()
        self.untidy: set[int] = set()
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
            retention_candidates(entries.values(), self.good),
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
        candidates = retention_candidates(entries.values(), self.good)
        for verdict in plan_retention(candidates, self._keep):
            if verdict.keep:
                continue
            self._require_lease()
            path = entries[verdict.step].path
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
