"""Loads a checkpoint into the ranks that run now: the protocol, told as a story."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpickpt.errors import CallMismatchError, CheckpointError
from mpickpt.format.manifest import parse_manifest
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.format.records import ShardManifest
from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.fetch import Fetch
from mpickpt.parallel.load_call import LoadCall, load_call
from mpickpt.parallel.logs import log_as_asked
from mpickpt.parallel.match import Matched, Matching, MatchOptions
from mpickpt.parallel.nodes import explain_missing
from mpickpt.parallel.saved_ranks import SavedRanks
from mpickpt.parallel.turns import turn_to_open_s
from mpickpt.parallel.waiting import Steps, run
from mpickpt.planning.flatten import FlatState, flatten
from mpickpt.planning.live import live_state
from mpickpt.planning.load_plan import assign_shards
from mpickpt.planning.rename import renamed
from mpickpt.state import AsSaved
from mpickpt.storage.catalog import read_manifest_text
from mpickpt.storage.layout_file import verify_layout
from mpickpt.storage.places import PlaceLike
from mpickpt.storage.shard_reader import is_vanished

log = logging.getLogger(__name__)

_MOST_ATTEMPTS = 10  # each time another save has replaced the checkpoint
_N_TAGS = 10_000


def load_sharded(
    path: PlaceLike,
    *,
    comm: Any = None,
    like: Any = None,
    expected_world_size: int | None = None,
    reshard: bool = False,
    verify: str | None = None,
    only: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    missing: str = "error",
    unexpected: str = "error",
    cast: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Load a checkpoint; every byte that is returned was verified.

    Parameters
    ----------
    path : path-like or URL
        Directory of the checkpoint, or its URL in a store: "s3://bucket/run/step-…".
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that load; None is this process alone, without MPI.
    like : tree, or callable of ShardManifest, optional
        What this rank wants. Its arrays are filled in place; `AsSaved` and
        `Sharded.spec` stand for arrays that the library allocates. A callable is
        called with the manifest and returns the tree.
    expected_world_size : int, optional
        Refuse a checkpoint that another number of ranks saved.
    reshard : bool
        Allow another number of ranks, or other boxes. Without `like`, each sharded
        array is then split in even blocks along axis 0.
    verify : {"sha256", "crc32", "none"}, optional
        What is compared: whole shards by SHA-256 (default), their blocks by CRC-32,
        or nothing but manifest and indexes. Default ``MPICKPT_VERIFY``.
    only : sequence of str, optional
        Patterns of keys to load, as in ["model/*"]; the rest of `like` keeps its
        values.
        Just the blocks that hold them are read, and verified by CRC-32.
    rename : dict of str to str, optional
        Saved key to wanted key, of an entry or a subtree: ``{"old/": "new/"}``.
    missing : {"error", "keep"}
        What to do with entries of `like` that were not saved.
    unexpected : {"error", "ignore"}
        What to do with saved entries that `like` does not have.
    cast : bool
        Convert to the dtypes of `like` where they differ.
    timeout_s : float, optional
        Seconds that a wait for other ranks may last without progress; how to choose
        it: see `SaveOptions`. Default ``MPICKPT_TIMEOUT_S``, else 600.

    Returns
    -------
    tree
        The tree that was saved, wrappers included, so that it can be saved again;
        with `like`, a tree of its shape around its arrays.

    Raises
    ------
    CheckpointNotFoundError, ManifestError, IncompleteCheckpointError
        There is no checkpoint, or it is not whole.
    CorruptShardError
        Bytes differ from what was saved.
    WorldSizeMismatchError, LayoutError
        Another number of ranks, other boxes, or entries that do not fit `like`.
    StorageError, CollectiveTimeoutError
        The file system or the store refused, or some rank did not arrive.

    Notes
    -----
    Collective: every rank of `comm` calls it, and every rank raises the same error;
    after an error the contents of `like` are undefined. Not thread-safe.
    """
    log_as_asked()
    call = load_call(
        path,
        like=like,
        expected_world_size=expected_world_size,
        reshard=reshard,
        verify=verify,
        only=only,
        rename=rename,
        missing=missing,
        unexpected=unexpected,
        cast=cast,
    )
    talks = conversations_of(comm, timeout_s)
    tag = next_tag(talks.memory)
    return run(Load(talks.load, call, tag).steps())


def next_tag(memory: dict[str, Any]) -> int:
    """Return a number for the messages of one load, the same on all ranks."""
    tag: int = (memory.get("loads", 0) + 1) % _N_TAGS
    memory["loads"] = tag
    return tag


class Load:
    """One load of one rank, from the manifest to the restored state.

    Attributes
    ----------
    manifest : ShardManifest or None
        Of what was loaded; a save that replaced the checkpoint meanwhile makes it
        another one than was there at first.
    readers : sequence of int or None
        The rank that reads each shard; None shares them out by size.
    """

    def __init__(self, talk: Conversation, call: LoadCall, tag: int) -> None:
        self.talk = talk
        self.call = call
        self.tag = tag
        self.manifest: ShardManifest | None = None
        self.readers: Sequence[int] | None = None

    def steps(self) -> Steps[Any]:
        """Load; once more from the start if the checkpoint was replaced meanwhile."""
        yield from self.agree_on_call()
        for attempt in range(_MOST_ATTEMPTS):
            manifest = self.manifest = yield from self.receive_manifest()
            try:
                return (yield from self.load(manifest))
            except CheckpointError as error:
                if not is_vanished(error):
                    raise
                now = yield from self.receive_manifest()
                last = attempt + 1 == _MOST_ATTEMPTS
                if last or now.checkpoint_id == manifest.checkpoint_id:
                    yield from explain_missing(
                        self.talk, self.call.directory, now.checkpoint_id, error
                    )
                    raise
        raise AssertionError("unreachable")

    def load(self, manifest: ShardManifest) -> Steps[Any]:
        """Load what this manifest describes."""
        self.call.require_world_size(manifest.world_size, self.talk.size)
        template = yield from self.talk.agree(
            lambda: self.template(manifest), "template"
        )
        ranks = SavedRanks(
            self.call.directory, manifest, lambda tree: renamed(tree, self.call.rename)
        )
        own = self.own_shards(manifest)
        turn_s = yield from self.talk.agree(
            lambda: self.read_indexes(manifest, ranks, own), "read indexes"
        )
        matched = yield from self.match(manifest, template, ranks, own)
        if self.call.only is not None and self.call.verify == "sha256":
            self.say_what_is_verified()
        fetch = Fetch(
            self.talk,
            [ranks.reader(rank) for rank in own],
            matched.wants,
            verify=self.call.verify,
            partial=self.call.only is not None,
            tag=self.tag,
            turn_s=turn_s,
        )
        yield from fetch.steps(in_place=matched.in_place)
        return (yield from self.talk.agree(matched.build, "rebuild"))

    def say_what_is_verified(self) -> None:
        """Let rank 0 say that SHA-256, which needs whole shards, is not compared."""
        if self.talk.rank == 0:
            log.info(
                "only=%s of %s: reading the blocks that hold it, verified by CRC-32",
                list(self.call.only or ()),
                self.call.directory,
            )

    def agree_on_call(self) -> Steps[None]:
        """Raise on every rank if arguments are unknown, or differ between ranks."""
        yield from self.talk.agree(self.call.check, "arguments")
        calls = yield from self.talk.allgather(self.call.packed(), "arguments")
        others = [rank for rank, call in enumerate(calls) if call != calls[0]]
        if others:
            raise CallMismatchError(
                f"rank {others[0]} called load_sharded with another path, reshard, "
                "verify, rename or expected_world_size than rank 0; every rank must "
                "pass the same",
                rank=others[0],
            )

    def receive_manifest(self) -> Steps[ShardManifest]:
        """Return the manifest, which rank 0 alone reads."""
        where = str(self.call.directory / MANIFEST_NAME)
        checked: list[ShardManifest] = []

        def read() -> bytes:
            text = read_manifest_text(self.call.directory)
            checked.append(parse_manifest(text, where=where))
            return text

        text = yield from self.talk.on_root(read, "read manifest")
        return checked[0] if checked else parse_manifest(text, where=where)

    def read_indexes(
        self, manifest: ShardManifest, ranks: SavedRanks, own: Sequence[int]
    ) -> float:
        """Read what tells where arrays lie; rank 0 also verifies the layout file.

        That one is not needed here, but a checkpoint of which a file is damaged or
        missing is not whole, and a load of all of it shall not pass over that. Returns
        how long this rank has waited for its turn to open files.
        """
        turn_s = turn_to_open_s(self.talk, self.call.directory)
        time.sleep(turn_s)
        for rank in own:
            ranks.require_listed(rank)
        whole = self.call.only is None and self.call.verify != "none"
        if self.talk.rank == 0 and manifest.layout is not None and whole:
            verify_layout(self.call.directory, manifest.layout)
        return turn_s

    def template(self, manifest: ShardManifest) -> FlatState | None:
        """Return the flattened `like`."""
        like = self.call.like
        if like is None:
            return None
        if callable(like) and like is not AsSaved and live_state(like) is None:
            like = like(manifest)
        return flatten(like, alone=self.talk.size == 1, template=True)

    def own_shards(self, manifest: ShardManifest) -> list[int]:
        """Return the saved ranks whose shards this rank reads."""
        nbytes = [shard.nbytes for shard in manifest.shards]
        readers = self.readers or assign_shards(nbytes, self.talk.size)
        return [saved for saved, rank in enumerate(readers) if rank == self.talk.rank]

    def match(
        self,
        manifest: ShardManifest,
        template: FlatState | None,
        ranks: SavedRanks,
        own: Sequence[int],
    ) -> Steps[Matched]:
        """Find out what to fetch: in place where boxes are the same, else anywhere."""
        matching = Matching(
            talk=self.talk,
            manifest=manifest,
            template=template,
            ranks=ranks,
            own=own,
            options=MatchOptions(
                rules=self.call.rules(),
                reshard=self.call.reshard,
                ignore_unexpected=self.call.unexpected == "ignore",
                only=self.call.only,
            ),
        )
        return (yield from matching.steps())
