"""The steps of a save: the protocol, told as a story."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

from mpickpt import __version__
from mpickpt.errors import CollectiveTimeoutError, StorageError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.hyperslab import whole
from mpickpt.format.naming import TMP_SUFFIX, shard_path
from mpickpt.format.records import LayoutRecord, ShardManifest, ShardRecord
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.describe import (
    Description,
    SaveMemory,
    describe,
    written_parts,
)
from mpickpt.parallel.layout_exchange import Resolved
from mpickpt.parallel.options import SaveResult
from mpickpt.parallel.receipts import dump_receipt, shard_records
from mpickpt.parallel.save_call import SaveCall
from mpickpt.parallel.waiting import Steps
from mpickpt.planning.flatten import HeldLeaf
from mpickpt.storage.checkpoint_writer import (
    make_room,
    publish_checkpoint,
    remove_if_empty,
    sweep,
    write_layout_file,
    write_shard_file,
)
from mpickpt.storage.commit import discard
from mpickpt.storage.shard_draft import DraftArray, ShardDraft, draft_shard
from mpickpt.storage.shard_image import hdf5_version
from mpickpt.storage.stream import ShardDigest

log = logging.getLogger(__name__)


class Save:
    """One save of one rank, from the description to the published manifest."""

    def __init__(self, talk: Conversation, memory: SaveMemory, call: SaveCall) -> None:
        self.talk = talk
        self.memory = memory
        self.call = call
        self.seconds: dict[str, float] = {}
        self.checkpoint_id = ""
        self.layout: LayoutRecord | None = None
        self.may_be_published = False

    def steps(self) -> Steps[SaveResult]:
        """Save, phase by phase; each ends with all ranks knowing how all fared."""
        with self.nothing_left_behind():
            description = yield from self.describe()
            yield from self.prepare(description)
            digest = yield from self.write(description)
            shards = yield from self.agree(description, digest)
            yield from self.publish(description, shards)
        return self.result(digest, shards)

    def describe(self) -> Steps[Description]:
        """Flatten the state; agree who holds what and who writes what."""
        with self.timed("describe"):
            return (
                yield from describe(
                    self.talk,
                    self.memory,
                    self.call.tree,
                    check=self.call.check,
                    path=str(self.call.directory),
                    step=self.call.step,
                    options=(self.call.overwrite, self.call.options),
                )
            )

    def prepare(self, description: Description) -> Steps[None]:
        """Rank 0 makes the directories and looks for room."""
        nbytes = sum(description.nbytes_of_ranks)

        def make() -> bytes:
            return make_room(
                self.call.directory,
                world_size=self.talk.size,
                nbytes=nbytes,
                overwrite=self.call.overwrite,
            ).encode()

        with self.timed("prepare"):
            answer = yield from self.talk.on_root(make, "prepare")
        self.checkpoint_id = answer.decode()

    def write(self, description: Description) -> Steps[ShardDigest]:
        """Every rank writes its shard and makes it durable."""
        draft = yield from self.talk.agree(lambda: self.draft(description), "write")

        def write(cancelled: Event) -> ShardDigest:
            digest = write_shard_file(self.own_shard, draft, self.call.style, cancelled)
            document = description.resolved.layout_document
            if document is not None:
                self.layout = write_layout_file(
                    self.call.directory, document, self.call.style
                )
            return digest

        with self.timed("write"):
            return (
                yield from self.talk.work(write, "write", moved=self.nbytes_on_disk)
            )

    def agree(
        self, description: Description, digest: ShardDigest
    ) -> Steps[list[ShardRecord]]:
        """Every rank learns the digest of every shard."""
        assert self.memory.shard is not None
        record = dump_receipt(
            self.talk.rank, digest, self.memory.shard.image, self.numel(description)
        )
        self.may_be_published = self.talk.rank != 0
        with self.timed("agree"):
            records = yield from self.talk.allgather(record, "agree")
        return list(shard_records(records, self.checkpoint_id))

    def publish(
        self, description: Description, shards: list[ShardRecord]
    ) -> Steps[None]:
        """Rank 0 renames the manifest: the checkpoint exists."""

        def publish() -> bytes:
            manifest = self.manifest(description, shards)
            self.may_be_published = True
            publish_checkpoint(self.call.directory, manifest)
            if self.call.overwrite:
                with contextlib.suppress(StorageError):
                    sweep(self.call.directory)
            return b""

        with self.timed("publish"):
            yield from self.talk.on_root(publish, "publish")

    def draft(self, description: Description) -> ShardDraft:
        """Return this rank's shard, ready to be streamed."""
        leaves = description.flat.leaves
        draft = draft_shard(
            description.flat.tree,
            self.draft_arrays(description),
            [[array for _, array in leaf.boxes] for leaf in leaves],
            rank=self.talk.rank,
            world_size=self.talk.size,
            known=self.memory.shard,
        )
        self.memory.shard = draft.layout
        return draft

    def draft_arrays(self, description: Description) -> tuple[DraftArray, ...]:
        """Return how the arrays are going to be stored; the last save's, if they fit."""
        resolved, leaves = description.resolved, description.flat.leaves
        own_shapes = tuple(_shape(leaf) for leaf in leaves if leaf.kind == "per_rank")
        known, shard = (resolved.digest, own_shapes), self.memory.shard
        if shard is None or self.memory.drafted != known:
            self.memory.drafted = known
            return tuple(draft_array(leaf, resolved) for leaf in leaves)
        return shard.arrays

    def numel(self, description: Description) -> int:
        """Return how many elements of sharded arrays this rank writes."""
        return sum(
            part.size
            for leaf in description.flat.leaves
            if leaf.kind == "sharded"
            for _, part in written_parts(leaf, description.resolved)
        )

    def manifest(
        self, description: Description, shards: list[ShardRecord]
    ) -> ShardManifest:
        """Return the manifest, on rank 0."""
        return ShardManifest(
            world_size=self.talk.size,
            step=self.call.step,
            wall_clock_seconds=run_time_s(),
            shards=tuple(shards),
            arrays=description.resolved.arrays,
            checkpoint_id=self.checkpoint_id,
            created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            writer={"mpickpt": __version__, "hdf5": hdf5_version()},
            run={},
            metrics=self.call.metrics or {},
            metadata=self.call.metadata or {},
            layout=self.layout,
        )

    def result(self, digest: ShardDigest, shards: list[ShardRecord]) -> SaveResult:
        """Return what was saved, and let rank 0 say so."""
        nbytes = sum(shard.nbytes for shard in shards)
        if self.talk.rank == 0:
            phases = ", ".join(f"{k} {v:.3f} s" for k, v in self.seconds.items())
            seconds = sum(self.seconds.values())
            log.info(
                "saved step %d: %.3f GB in %.3f s, %.2f GB/s (%s) to %s",
                self.call.step,
                nbytes / 1e9,
                seconds,
                nbytes / 1e9 / max(seconds, 1e-9),
                phases,
                self.call.directory,
            )
        return SaveResult(
            path=self.call.directory,
            step=self.call.step,
            checkpoint_id=self.checkpoint_id,
            nbytes=nbytes,
            written_nbytes=digest.nbytes,
            seconds=self.seconds,
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
            if not self.published_or_unknown(error):
                self.remove_own_files()
            raise

    def published_or_unknown(self, error: BaseException) -> bool:
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


def draft_array(leaf: HeldLeaf, resolved: Resolved) -> DraftArray:
    """Return how one array is going to be stored on this rank."""
    answer = resolved.answers[leaf.key]
    own = leaf.kind == "per_rank"
    shape = _shape(leaf) if own else answer.global_shape
    assert shape is not None
    return DraftArray(
        key=leaf.key,
        kind=leaf.kind,
        dtype=leaf.dtype or parse_dtype(answer.dtype),
        shape=shape,
        boxes=(whole(shape),) if own else tuple(box for box, _ in answer.boxes),
        parts=written_parts(leaf, resolved),
        bare=leaf.bare,
    )


def _shape(leaf: HeldLeaf) -> tuple[int, ...]:
    """Return the shape of a per-rank array."""
    return tuple(leaf.boxes[0][1].shape)


def run_time_s() -> float:
    """Return the seconds since this process was started."""
    with open("/proc/self/stat", "rb") as stat:
        # Field 22, counted after the name in parentheses, which may hold spaces: the
        # start in clock ticks since boot (proc(5)).
        ticks = int(stat.read().rpartition(b")")[2].split()[19])
    started = ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
