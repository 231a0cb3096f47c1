"""Follows one checkpoint on its way to one target; does no I/O of its own."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mpickpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
    StorageError,
)
from mpickpt.format.naming import step_directory_name
from mpickpt.format.records import ShardManifest
from mpickpt.planning.pace_of_bytes import BytePace
from mpickpt.storage.copy_target import TierKind, files_of
from mpickpt.storage.places import Place

UploadPhase = Literal["waiting", "copying", "publishing", "done", "failed"]

# What trying again does not mend: damage, or what a person has to decide.
_FINAL = (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
)
_SOURCE_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadTarget:
    """A run directory, or a run in a store, that checkpoints are copied to.

    Attributes
    ----------
    run : Path or RemotePath
        Where the directories of the steps lie.
    pace : BytePace
        How fast this process may copy there; by default as fast as it can.
    kind : {"local", "directory", "object"}, optional
        What manifests say of it; by default what it is.
    """

    run: Place
    pace: BytePace = field(default_factory=BytePace)
    kind: TierKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRules:
    """How patient an uploader is.

    Attributes
    ----------
    jobs : int
        Files that are copied at the same time to one target.
    first_pause_s, longest_pause_s : float
        How long it waits after a failure; twice as long after each further one.
    look_s : float
        How long between two looks for the shards of other ranks; up to eight times as
        long while none comes.
    others_s : float
        How long none of them may come before it is given up.
    """

    jobs: int = 1
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    look_s: float = 0.5
    others_s: float = 900.0

    def pause_s(self, n_failed: int) -> float:
        """Return how long to wait after so many failures."""
        pause_s = self.first_pause_s * 2.0 ** min(n_failed - 1, 20)
        return min(pause_s, self.longest_pause_s)

    def next_look_s(self, waited_s: float) -> float:
        """Return how long to wait for others who did not come for so long."""
        return self.look_s * min(8.0, max(1.0, waited_s / 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadState:
    """How far one checkpoint has come on its way to one target.

    Attributes
    ----------
    step : int
        The step.
    target : UploadTarget
        Where it is copied to.
    phase : str
        "waiting" for its turn or for the next try, "copying", "publishing" (waiting
        for the shards of other ranks), "done" (what this process does of it) or
        "failed".
    nbytes_done, nbytes : int
        Bytes of this process's shards that are there, and all of them.
    n_tries : int
        How often it has begun.
    error : CheckpointError or None
        What went wrong in the last try, or for good.
    """

    step: int
    target: UploadTarget
    phase: UploadPhase
    nbytes_done: int
    nbytes: int
    n_tries: int
    error: CheckpointError | None


class Upload:
    """One checkpoint on its way to one target.

    Notes
    -----
    Changed by the copying thread alone, and read by others.
    """

    def __init__(
        self,
        manifest: ShardManifest,
        source: Path,
        ranks: Sequence[int],
        target: UploadTarget,
        *,
        publishes: bool,
    ) -> None:
        self.manifest = manifest
        self.source = source
        self.ranks = ranks
        self.target = target
        self.publishes = publishes
        self.phase: UploadPhase = "waiting"
        self.due_s = 0.0
        self.nbytes = sum(record.nbytes for record in files_of(manifest, ranks))
        self.nbytes_done = 0
        self.most_nbytes_done = 0
        self.n_tries = 0
        self.error: CheckpointError | None = None
        self._missing: tuple[int, ...] = ()
        self._missing_since_s: float = 0.0
        self._lock = threading.Lock()

    @property
    def place(self) -> Place:
        """The directory of the copy."""
        return self.target.run / step_directory_name(self.manifest.step)

    def begin_try(self) -> None:
        """Count a try, which begins from what it finds in the target."""
        self.n_tries += 1
        self.phase = "copying"
        self.nbytes_done = 0

    def moved(self, nbytes: int) -> None:
        """Count bytes that the target has; from any thread."""
        with self._lock:
            self.nbytes_done += nbytes
            # What a failed try moved again is no progress.
            self.most_nbytes_done = max(self.most_nbytes_done, self.nbytes_done)

    def waits_for(self, missing: Sequence[int], now_s: float) -> float:
        """Return for how long exactly these ranks have been missing."""
        if self._missing != tuple(missing):
            self._missing, self._missing_since_s = tuple(missing), now_s
        return now_s - self._missing_since_s

    def end(self, error: CheckpointError | None = None) -> None:
        """End well, or for good with an error."""
        self.error = error
        self.phase = "failed" if error else "done"

    def may_succeed_later(self, error: CheckpointError) -> bool:
        """Tell whether another try may help."""
        if isinstance(error, _FINAL):
            return False
        # A disk that cannot read what it holds is as good as damaged.
        is_of_source = (
            isinstance(error, StorageError)
            and error.path is not None
            and Path(error.path).is_relative_to(self.source)
        )
        return not is_of_source or self.n_tries < _SOURCE_TRIES

    def state(self) -> UploadState:
        """Return how far it has come."""
        return UploadState(
            step=self.manifest.step,
            target=self.target,
            phase=self.phase,
            nbytes_done=min(self.nbytes_done, self.nbytes),
            nbytes=self.nbytes,
            n_tries=self.n_tries,
            error=self.error,
        )
