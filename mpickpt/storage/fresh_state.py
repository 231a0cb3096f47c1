"""Reads a checkpoint that another save may replace, or retention delete, meanwhile."""

from collections.abc import Callable
from typing import TypeVar

from mpickpt.errors import CheckpointError, IncompleteCheckpointError, ManifestError
from mpickpt.storage.catalog import read_manifest
from mpickpt.storage.places import Place
from mpickpt.storage.saved_state import SavedState
from mpickpt.storage.shard_reader import is_vanished

T = TypeVar("T")

_MOST_ATTEMPTS = 5


class FreshState:
    """The state in a directory, as the manifest describes it that stands there now.

    Parameters
    ----------
    path : Path or RemotePath
        Directory of the checkpoint.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self._state: SavedState | None = SavedState(path, read_manifest(path))

    @property
    def now(self) -> SavedState:
        """The state, unless it was closed."""
        if self._state is None:
            raise ValueError(f"the checkpoint {self.path} was closed")
        return self._state

    def close(self) -> None:
        """Drop everything that is kept in memory."""
        self._state = None

    def attempt(self, read: Callable[[SavedState], T]) -> T:
        """Return what a reading gives; when shards are gone, by a newer manifest.

        Raises
        ------
        CheckpointNotFoundError
            If the checkpoint was deleted.
        IncompleteCheckpointError
            If its manifest still names the files that are gone.
        """
        for _ in range(_MOST_ATTEMPTS):
            state = self.now
            try:
                return read(state)
            except RecursionError as error:
                raise ManifestError(f"{self.path}: nested too deeply") from error
            except CheckpointError as error:
                if not is_vanished(error):
                    raise
                manifest = read_manifest(self.path)
                if manifest.checkpoint_id == state.manifest.checkpoint_id:
                    raise _as_incomplete(error) from error
                self._state = SavedState(self.path, manifest)
        text = f"{self.path} was replaced {_MOST_ATTEMPTS} times while it was read"
        raise IncompleteCheckpointError(text, path=str(self.path))


def _as_incomplete(error: CheckpointError) -> IncompleteCheckpointError:
    if isinstance(error, IncompleteCheckpointError):
        return error
    return IncompleteCheckpointError(error.message, path=getattr(error, "path", None))
