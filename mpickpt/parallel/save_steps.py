"""The steps of a save: the protocol, told as a story.

A save has two halves. In the first the program waits: the state is described, agreed
on and drafted. The second writes, agrees and publishes; it runs at once, or while the
program goes on.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any

from mpickpt.errors import CollectiveTimeoutError, StorageError
from mpickpt.format.naming import TMP_SUFFIX, shard_path
from mpickpt.format.records import LayoutRecord, ShardManifest
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.describe import Description, SaveMemory, describe
from mpickpt.parallel.drafting import Drafted, draft
from mpickpt.parallel.nodes import require_one_directory
from mpickpt.parallel.options import SaveResult
from mpickpt.parallel.receipts import (
    Receipt,
    Receipts,
    dump_receipt,
    receipt_of,
    receipts_document,
    shard_records,
)
from mpickpt.parallel.save_call import SaveCall
from mpickpt.parallel.turns import turn_to_create_s
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.striping import parse_striping
from mpickpt.storage.checkpoint_writer import (
    WriteStyle,
    publish_checkpoint,
    write_layout_file,
    write_receipts_file,
)
from mpickpt.storage.commit import discard
from mpickpt.storage.permissions import permission_notes
from mpickpt.storage.room import (
    Demand,
    Room,
    enter_room,
    make_room,
    remove_if_empty,
)
from mpickpt.storage.shard_draft import ShardDraft
from mpickpt.storage.shard_image import hdf5_version
from mpickpt.storage.stream import ShardDigest
from mpickpt.storage.sweep import sweep
from mpickpt.version import __version__

log = logging.getLogger(__name__)

WriteShard = Callable[[Path, Event], ShardDigest]


class Save:
    """One save of one rank, from the description to the published manifest.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    memory : SaveMemory
        What saves of this communicator remember.
    call : SaveCall
        The arguments.
    """

    def __init__(self, talk: Conversation, memory: SaveMemory, call: SaveCall) -> None:
        self.talk = talk
        self.memory = memory
        self.call = call
        self.seconds: dict[str, float] = {}
        self.checkpoint_id = ""
        self.room: Room | None = None
        self.layout: LayoutRecord | None = None
        self.may_be_published = False

    def drafted(self) -> Steps[Drafted]:
        """Do the first half: agree on the layout, make the directories, draft."""
        with self.nothing_left_behind():
            description = yield from self.describe()
            yield from self.prepare(description)
            made = yield from self.draft(description)
        return Drafted(description=description, draft=made)

    def published(self, drafted: Drafted, write: WriteShard) -> Steps[SaveResult]:
        """Do the second half: write, agree, publish.

        Parameters
        ----------
        drafted : Drafted
            What the first half gave.
        write : callable of (Path, Event)
            Writes this rank's shard to the path, durably; called in a thread.
        """
        with self.nothing_left_behind():
            digest = yield from self.write(drafted, write)
            receipts = yield from self.agree(drafted, digest)
            yield from self.publish(drafted.description, receipts)
        return self.result(digest, receipts)

    def forget_state(self) -> None:
        """Let go of the state, which was copied."""
        self.call = replace(self.call, state=_forgotten)

    def describe(self) -> Steps[Description]:
        """Flatten the state; agree who holds what and who writes what."""
        with self.timed("describe"):
            return (
                yield from describe(
                    self.talk,
                    self.memory,
                    self.call.state,
                    check=self.call.check,
                    path=str(self.call.directory),
                    step=self.call.step,
                    options=(self.call.overwrite, self.call.options),
                )
            )

    def prepare(self, description: Description) -> Steps[None]:
        """Rank 0 makes the directories and looks for room."""
        demand = Demand(
            world_size=self.talk.size,
            nbytes=description.nbytes,
            overwrite=self.call.overwrite,
            block_nbytes=self.call.options.block_nbytes,
            direct_io=self.call.options.direct_io or "auto",
            striping=parse_striping(self.call.options.striping),
            known_shared=self.memory.known_shared,
        )

        def make() -> bytes:
            room = make_room(
                self.call.directory,
                demand,
                claim=self.call.check_launcher,
                make_space=self.call.make_space,
            )
            return room.encode()

        with self.timed("prepare"):
            answer = yield from self.talk.on_root(make, "prepare")
            self.room = Room.decode(answer)
            self.checkpoint_id = self.room.save_id
            if not self.room.known_shared:
                yield from require_one_directory(
                    self.talk, self.call.directory, self.checkpoint_id
                )
        self.memory.known_shared = True

    def draft(self, description: Description) -> Steps[ShardDraft]:
        """Every rank lays out its shard."""

        def make() -> ShardDraft:
            rank, size = self.talk.rank, self.talk.size
            return draft(description, self.memory, rank=rank, world_size=size)

        with self.timed("draft"):
            return (yield from self.talk.agree(make, "draft"))

    def write(self, drafted: Drafted, write: WriteShard) -> Steps[ShardDigest]:
        """Every rank writes its shard and makes it durable."""
        document = drafted.description.resolved.layout_document
        room, style = self.agreed_room, self.style
        turn_s = turn_to_create_s(self.talk, room.creates_per_s)

        def write_files(cancelled: Event) -> ShardDigest:
            cancelled.wait(turn_s)
            enter_room(self.own_shard, self.call.directory, room.inode)
            digest = write(self.own_shard, cancelled)
            self.seconds["write"] = time.monotonic() - start
            if document is not None:
                self.layout = write_layout_file(self.call.directory, document, style)
            return digest

        start = time.monotonic()
        return (
            yield from self.talk.work(write_files, "write", moved=self.nbytes_on_disk)
        )

    def agree(self, drafted: Drafted, digest: ShardDigest) -> Steps[Receipts]:
        """Every rank learns the digest of every shard."""
        receipt = receipt_of(
            self.talk.rank,
            digest,
            drafted.draft.layout.image,
            numel=drafted.description.resolved.n_sharded_elements,
            stage_s=self.seconds.get("stage", 0.0),
            write_s=self.seconds["write"],
        )
        self.may_be_published = self.talk.rank != 0
        with self.timed("agree"):
            records = yield from self.talk.allgather(dump_receipt(receipt), "agree")
        return Receipts(records)

    def publish(self, description: Description, receipts: Receipts) -> Steps[None]:
        """Rank 0 renames the manifest: the checkpoint exists."""

        def publish() -> bytes:
            shards = list(receipts)
            manifest = self.manifest(description, shards)
            document = receipts_document(shards, self.seconds)
            write_receipts_file(self.call.directory, self.checkpoint_id, document)
            self.call.check_launcher()
            self.call.before_publish()
            self.may_be_published = True
            publish_checkpoint(self.call.directory, manifest)
            if self.call.overwrite:
                with contextlib.suppress(StorageError):
                    sweep(self.call.directory)
            self.warn_of_permissions()
            return b""

        with self.timed("publish"):
            yield from self.talk.on_root(publish, "publish")

    def manifest(
        self, description: Description, receipts: Sequence[Receipt]
    ) -> ShardManifest:
        """Return the manifest, on rank 0."""
        return ShardManifest(
            world_size=self.talk.size,
            step=self.call.step,
            wall_clock_seconds=self.call.run_time_s(),
            shards=tuple(shard_records(receipts, self.checkpoint_id)),
            arrays=description.resolved.arrays,
            checkpoint_id=self.checkpoint_id,
            created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            writer={"mpickpt": __version__, "hdf5": hdf5_version()},
            run=dict(self.call.run),
            metrics=self.call.metrics or {},
            metadata=self.call.metadata or {},
            layout=self.layout,
        )

    def result(self, digest: ShardDigest, receipts: Receipts) -> SaveResult:
        """Return what was saved, and let rank 0 say so."""
        nbytes = receipts.nbytes
        if self.talk.rank == 0:
            self.say(nbytes, receipts.slowest)
        return SaveResult(
            path=self.call.directory,
            step=self.call.step,
            checkpoint_id=self.checkpoint_id,
            nbytes=nbytes,
            written_nbytes=digest.nbytes,
            seconds=self.seconds,
        )

    def say(self, nbytes: int, slowest: Receipt) -> None:
        """Log one line for the save."""
        seconds = sum(self.seconds.values())
        log.info(
            "step %d: saved %.3f GB in %.3f s, %.2f GB/s; %s; slowest rank %d wrote "
            "for %.3f s; %s",
            self.call.step,
            nbytes / 1e9,
            seconds,
            nbytes / 1e9 / max(seconds, 1e-9),
            ", ".join(f"{phase} {s:.3f} s" for phase, s in self.seconds.items()),
            slowest.rank,
            slowest.write_s,
            self.call.directory,
        )

    def warn_of_permissions(self) -> None:
        """Say once on rank 0 if others may read the run, but not what was saved."""
        if not self.memory.told_permissions:
            self.memory.told_permissions = True
            made = (self.call.directory, self.own_shard)
            for note in permission_notes(self.call.directory.parent, made):
                log.warning("%s", note)

    @property
    def agreed_room(self) -> Room:
        """Where and how all ranks write; known once the save is prepared."""
        assert self.room is not None
        return self.room

    @property
    def style(self) -> WriteStyle:
        """How the shards are written."""
        return WriteStyle(
            block_nbytes=self.agreed_room.block_nbytes,
            direct=self.agreed_room.direct,
            read_back=self.call.options.read_back,
        )

    @property
    def own_shard(self) -> Path:
        """Path of the shard that this rank writes."""
        name = shard_path(self.talk.rank, self.talk.size, self.checkpoint_id)
        return self.call.directory / name

    def nbytes_on_disk(self) -> int:
        """Return how far the shard has grown."""
        path = self.own_shard
        for name in (path.name + TMP_SUFFIX, path.name):
            with contextlib.suppress(OSError):
                return path.with_name(name).stat().st_size
        return 0

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Note how long a phase takes on this rank."""
        start = time.monotonic()
        yield
        self.seconds[phase] = time.monotonic() - start

    @contextlib.contextmanager
    def nothing_left_behind(self) -> Iterator[None]:
        """Remove this save's files if it fails before it can have been published."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, CollectiveTimeoutError):
                error.outcome = "unknown" if self.may_be_published else "unpublished"
            if not self.is_published_or_unknown(error):
                self.remove_own_files()
            raise

    def is_published_or_unknown(self, error: BaseException) -> bool:
        """Tell whether a manifest may refer to this save's files."""
        if isinstance(error, StorageError):
            return error.outcome == "unknown"
        interrupted = not isinstance(error, Exception)
        if isinstance(error, CollectiveTimeoutError) or interrupted:
            return self.may_be_published
        return False

    def remove_own_files(self) -> None:
        """Remove what this rank wrote."""
        if not self.checkpoint_id:
            return
        path = self.own_shard
        discard(path.with_name(path.name + TMP_SUFFIX))
        discard(path)
        if self.talk.rank == 0:
            with contextlib.suppress(StorageError):
                sweep(self.call.directory)
            remove_if_empty(self.call.directory, self.talk.size)


def _forgotten() -> Any:
    raise AssertionError("the state was copied and is not asked for again")
