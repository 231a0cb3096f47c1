"""Says what a place must do to have checkpoints copied to it; does no I/O."""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mpickpt.errors import CheckpointError
from mpickpt.format.records import LayoutRecord, ShardManifest, ShardRecord
from mpickpt.planning.pace_of_bytes import BytePace
from mpickpt.storage.places import Place

__all__ = [
    "CopyControl",
    "CopyTarget",
    "FileRecord",
    "Place",
    "Progress",
    "TierKind",
    "files_of",
    "mark_of",
]

FileRecord = ShardRecord | LayoutRecord
Progress = Callable[[int], None]
TierKind = Literal["local", "directory", "object"]


def _ignored(nbytes: int) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyControl:
    """What steers a copy while it is made.

    Attributes
    ----------
    pace : BytePace
        How fast bytes may go; by default as fast as they can.
    cancelled : Event
        Ends the copy soon after it was set, with a CheckpointError.
    progress : callable
        Called with a number of bytes when these were moved, from any thread.
    """

    pace: BytePace = field(default_factory=BytePace)
    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: Progress = _ignored

    def moved(self, nbytes: int, where: object) -> None:
        """Wait until these bytes may go; raise CheckpointError if it is cancelled."""
        self.pace.take(nbytes, self.cancelled)
        if self.cancelled.is_set():
            raise CheckpointError(f"the copy to {where} was broken off")
        self.progress(nbytes)


class CopyTarget(Protocol):
    """A place that one checkpoint is copied to.

    Notes
    -----
    Several processes may do all of this at once, for one checkpoint or for several.
    """

    kind: TierKind

    def published(self) -> ShardManifest | None:
        """Return the manifest that is there."""

    def seems_published(self) -> bool:
        """Tell whether a manifest is there, at the least cost: every rank asks."""

    def begin(self, manifest: ShardManifest, source: Place) -> None:
        """Make the place ready and mark it, so that nobody takes it for rubbish."""

    def is_whole(self, record: FileRecord) -> bool:
        """Tell whether a file is there, as far as names, sizes and stores tell."""

    def missing_files(self, manifest: ShardManifest) -> list[str]:
        """Return the paths of the manifest's files that are not there, or not whole.

        Sizes are looked at when all names are there.
        """

    def take(
        self,
        record: FileRecord,
        source: Place,
        control: CopyControl,
        *,
        replace: bool = False,
    ) -> None:
        """Copy a file, verified; whole and durable under its name when it returns.

        `replace` is for one that seems to be there whole.
        """

    def publish(self, content: bytes) -> bool:
        """Put the manifest there, durably; False if there is one already."""

    def withdraw(self, content: bytes) -> None:
        """Take this very manifest away again."""

    def confirm(self) -> None:
        """Make durable what another process has published."""

    def tidy(self, manifest: ShardManifest) -> None:
        """Remove what copies left beside the published files, as well as can be."""


def files_of(manifest: ShardManifest, ranks: Iterable[int]) -> list[FileRecord]:
    """Return the files that belong to ranks; the layout file goes with rank 0."""
    files: list[FileRecord] = [manifest.shards[rank] for rank in ranks]
    if manifest.layout is not None and 0 in ranks:
        files.append(manifest.layout)
    return files


def mark_of(manifest: ShardManifest, source: Place) -> bytes:
    """Return what stands in the file that marks where a checkpoint is copied to."""
    document = {
        "checkpoint_id": manifest.checkpoint_id,
        "nbytes": manifest.nbytes,
        "source": str(source),
    }
    return json.dumps(document, indent=1).encode() + b"\n"
