"""Says where a save writes: makes it ready, and publishes there.

The steps of a save are the same wherever it writes. Who makes directories, who looks
for room and who renames a manifest depends on whether all ranks write into one
directory or each into that of its node.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mpickpt.errors import StorageError
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.describe import Description, SaveMemory
from mpickpt.parallel.line import ROOT
from mpickpt.parallel.nodes import require_one_directory
from mpickpt.parallel.save_call import SaveCall
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.striping import parse_striping
from mpickpt.storage.checkpoint_writer import publish_checkpoint
from mpickpt.storage.room import Demand, Room, make_room, remove_if_empty
from mpickpt.storage.sweep import sweep

MakeManifest = Callable[[], ShardManifest]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that this rank has written, durably.

    Attributes
    ----------
    name : str
        Path, relative to the checkpoint's directory.
    nbytes : int
        Size.
    sha256 : str
        Digest of the whole file, hex.
    image : memoryview or None
        Its bytes, where they still lie in memory.
    """

    name: str
    nbytes: int
    sha256: str
    image: memoryview | None = None


class Ground(Protocol):
    """Where one save writes, and how far it has come there.

    Attributes
    ----------
    directory : Path
        Of the checkpoint, as this rank sees it.
    room : Room or None
        Where and how this rank writes; None until the ground is prepared.
    may_be_published : bool
        Whether a manifest may refer to the files of this save by now.
    keeps_copies : bool
        Whether other ranks keep each file once more.
    """

    directory: Path
    room: Room | None
    may_be_published: bool
    keeps_copies: bool

    @property
    def name(self) -> str:
        """What all ranks call the checkpoint's place."""

    def prepare(
        self,
        talk: Conversation,
        memory: SaveMemory,
        call: SaveCall,
        description: Description,
    ) -> Steps[None]:
        """Make directories and look for room."""

    def copy(self, talk: Conversation, files: Sequence[WrittenFile]) -> Steps[None]:
        """Have other ranks keep the files that this one has written."""

    def send_receipts(self, rank: int) -> None:
        """Note that others may publish as soon as they have all receipts."""

    def publish(
        self, talk: Conversation, make_manifest: MakeManifest, *, overwrite: bool
    ) -> Steps[None]:
        """Publish the manifest that rank 0 makes."""

    def clear(self, talk: Conversation) -> None:
        """Remove what is left of a save that failed, but for this rank's own shard."""


class SharedGround:
    """One directory that all ranks see; rank 0 makes it and publishes in it.

    Parameters
    ----------
    directory : Path
        Of the checkpoint, absolute.
    """

    keeps_copies = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.room: Room | None = None
        self.may_be_published = False

    @property
    def name(self) -> str:
        """The directory."""
        return str(self.directory)

    def prepare(
        self,
        talk: Conversation,
        memory: SaveMemory,
        call: SaveCall,
        description: Description,
    ) -> Steps[None]:
        """Rank 0 makes the directories and looks for room."""
        demand = demand_of(call, talk.size, description.nbytes, memory.known_shared)

        def make() -> bytes:
            room = make_room(
                self.directory,
                demand,
                claim=call.check_launcher,
                make_space=call.make_space,
            )
            return room.encode()

        answer = yield from talk.on_root(make, "prepare")
        self.room = Room.decode(answer)
        if not self.room.known_shared:
            yield from require_one_directory(talk, self.directory, self.room.save_id)
        memory.known_shared = True

    def copy(self, talk: Conversation, files: Sequence[WrittenFile]) -> Steps[None]:
        """Keep none: the file system does, or does not."""
        yield from ()

    def send_receipts(self, rank: int) -> None:
        """Note that rank 0 may publish as soon as it has all receipts."""
        self.may_be_published = rank != ROOT

    def publish(
        self, talk: Conversation, make_manifest: MakeManifest, *, overwrite: bool
    ) -> Steps[None]:
        """Rank 0 renames the manifest: the checkpoint exists."""

        def publish() -> bytes:
            manifest = make_manifest()
            self.may_be_published = True
            publish_checkpoint(self.directory, manifest)
            if overwrite:
                sweep_replaced(self.directory)
            return b""

        yield from talk.on_root(publish, "publish")

    def clear(self, talk: Conversation) -> None:
        """Rank 0 removes what is left in the directory, and then that."""
        if self.room is not None and talk.rank == ROOT:
            sweep_replaced(self.directory)
            remove_if_empty(self.directory, talk.size)


def demand_of(
    call: SaveCall, world_size: int, nbytes: int, known_shared: bool
) -> Demand:
    """Return what a save is going to write, if all is written into one directory."""
    return Demand(
        world_size=world_size,
        nbytes=nbytes,
        overwrite=call.overwrite,
        block_nbytes=call.options.block_nbytes,
        direct_io=call.options.direct_io or "auto",
        striping=parse_striping(call.options.striping),
        known_shared=known_shared,
    )


def sweep_replaced(directory: Path) -> None:
    """Remove what no manifest refers to any more, as well as can be."""
    with contextlib.suppress(StorageError):
        sweep(directory)
