"""The steps of a save: the protocol, told as a story.

A save has two halves. In the first the program waits: the state is described, agreed
on and drafted. The second writes, agrees and publishes; it runs at once, or while the
program goes on.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from mpickpt.errors import CollectiveTimeoutError, StorageError
from mpickpt.format.naming import TMP_SUFFIX, shard_path
from mpickpt.format.records import LayoutRecord, ShardManifest
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.describe import Description, SaveMemory, describe
from mpickpt.parallel.drafting import Drafted, draft
from mpickpt.parallel.ground import Ground, SharedGround, WrittenFile
from mpickpt.parallel.options import SaveResult
from mpickpt.parallel.receipts import (
    Receipt,
    Receipts,
    dump_receipt,
    receipt_of,
    receipts_document,
)
from mpickpt.parallel.save_call import SaveCall
from mpickpt.parallel.save_record import manifest_of, say_saved, warn_of_permissions
from mpickpt.parallel.turns import turn_to_create_s
from mpickpt.parallel.waiting import Steps
from mpickpt.storage.checkpoint_writer import (
    WriteStyle,
    write_layout_file,
    write_receipts_file,
)
from mpickpt.storage.commit import discard
from mpickpt.storage.room import Room, enter_room
from mpickpt.storage.shard_draft import ShardDraft
from mpickpt.storage.stream import ShardDigest

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
        self.ground: Ground = call.ground or SharedGround(call.directory)
        self.layout: LayoutRecord | None = None

    def drafted(self) -> Steps[Drafted]:
        """Do the first half: agree on the layout, make the directories, draft."""
        with self.nothing_left_behind():
            description = yield from self.describe()
            yield from self.prepare(description)
            made = yield from self.draft(description)
        return Drafted(description=description, draft=made)

    def published(
        self, drafted: Drafted, write: WriteShard, image: memoryview | None = None
    ) -> Steps[SaveResult]:
        """Do the second half: write, copy, agree, publish.

        Parameters
        ----------
        drafted : Drafted
            What the first half gave.
        write : callable of (Path, Event)
            Writes this rank's shard to the path, durably; called in a thread.
        image : memoryview, optional
            The bytes of the shard, if they lie in memory once it is written.
        """
        with self.nothing_left_behind():
            digest = yield from self.write(drafted, write)
            if self.ground.keeps_copies:
                yield from self.copy(digest, image)
            receipts = yield from self.agree(drafted, digest)
            yield from self.publish(drafted.description, receipts)
        return self.result(digest, receipts)

    def forget_state(self) -> None:
        """Let go of the state, which was copied."""
        self.call = replace(self.call, state=_forgotten)

    def describe(self) -> Steps[Description]:
        """Flatten the state; agree who holds what and who writes what."""
        call, ground = self.call, self.ground
        with self.timed("describe"):
            return (
                yield from describe(
                    self.talk,
                    self.memory,
                    call.state,
                    check=call.check,
                    path=ground.name,
                    step=call.step,
                    options=(call.overwrite, call.options, ground.keeps_copies),
                )
            )

    def prepare(self, description: Description) -> Steps[None]:
        """Make directories and look for room."""
        with self.timed("prepare"):
            yield from self.ground.prepare(
                self.talk, self.memory, self.call, description
            )

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
        directory, room = self.ground.directory, self.agreed_room
        turn_s = turn_to_create_s(self.talk, room.creates_per_s)

        def write_files(cancelled: Event) -> ShardDigest:
            cancelled.wait(turn_s)
            enter_room(self.own_shard, directory, room.inode)
            digest = write(self.own_shard, cancelled)
            self.seconds["write"] = time.monotonic() - start
            if document is not None:
                self.layout = write_layout_file(directory, document, self.style)
            return digest

        start = time.monotonic()
        return (
            yield from self.talk.work(write_files, "write", moved=self.nbytes_on_disk)
        )

    def copy(self, digest: ShardDigest, image: memoryview | None) -> Steps[None]:
        """Have other ranks keep once more what this one has written."""
        name = str(self.own_shard.relative_to(self.ground.directory))
        files = [WrittenFile(name, digest.nbytes, digest.sha256, image)]
        if (found := self.layout) is not None:
            files.append(WrittenFile(found.path, found.nbytes, found.sha256))
        with self.timed("copy"):
            yield from self.ground.copy(self.talk, files)

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
        self.ground.send_receipts(self.talk.rank)
        with self.timed("agree"):
            records = yield from self.talk.allgather(dump_receipt(receipt), "agree")
        return Receipts(records)

    def publish(self, description: Description, receipts: Receipts) -> Steps[None]:
        """Give the checkpoint its manifest: it exists."""

        def make_manifest() -> ShardManifest:
            shards = list(receipts)
            manifest = self.manifest(description, shards)
            document = receipts_document(shards, self.seconds)
            write_receipts_file(self.ground.directory, self.checkpoint_id, document)
            self.call.check_launcher()
            self.call.before_publish()
            return manifest

        with self.timed("publish"):
            yield from self.ground.publish(
                self.talk, make_manifest, overwrite=self.call.overwrite
            )

    def manifest(
        self, description: Description, receipts: Sequence[Receipt]
    ) -> ShardManifest:
        """Return the manifest, on rank 0."""
        return manifest_of(
            self.call, description, receipts, self.checkpoint_id, self.layout
        )

    def result(self, digest: ShardDigest, receipts: Receipts) -> SaveResult:
        """Return what was saved, and let rank 0 say so."""
        result = SaveResult(
            path=self.ground.directory,
            step=self.call.step,
            checkpoint_id=self.checkpoint_id,
            nbytes=receipts.nbytes,
            written_nbytes=digest.nbytes,
            seconds=self.seconds,
            receipts=receipts,
        )
        if self.talk.rank == 0:
            say_saved(result, receipts.slowest, self.ground.name)
            if not self.memory.told_permissions:
                self.memory.told_permissions = True
                warn_of_permissions(self.ground.directory, self.own_shard)
        return result

    @property
    def checkpoint_id(self) -> str:
        """Id of this save; known once it is prepared."""
        return self.agreed_room.save_id

    @property
    def agreed_room(self) -> Room:
        """Where and how this rank writes; known once the save is prepared."""
        assert self.ground.room is not None
        return self.ground.room

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
        return self.ground.directory / name

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
                may_be = self.ground.may_be_published
                error.outcome = "unknown" if may_be else "unpublished"
            if not self.is_published_or_unknown(error):
                self.remove_own_files()
            raise

    def is_published_or_unknown(self, error: BaseException) -> bool:
        """Tell whether a manifest may refer to this save's files."""
        if isinstance(error, StorageError):
            return error.outcome == "unknown"
        interrupted = not isinstance(error, Exception)
        if isinstance(error, CollectiveTimeoutError) or interrupted:
            return self.ground.may_be_published
        return False

    def remove_own_files(self) -> None:
        """Remove what this rank wrote."""
        if self.ground.room is not None:
            shard = self.own_shard
            discard(shard.with_name(shard.name + TMP_SUFFIX))
            discard(shard)
        self.ground.clear(self.talk)


def _forgotten() -> Any:
    raise AssertionError("the state was copied and is not asked for again")
