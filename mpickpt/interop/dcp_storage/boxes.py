"""Reads boxes of saved arrays into arrays of the program; every byte is verified.

The protocol is that of a load; only what is wanted is said by key and box, not by a
tree of the program.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpickpt.errors import CheckpointError, LayoutError, ManifestError
from mpickpt.format.dtypes import dtype_name
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.records import ArrayRecord, ShardManifest
from mpickpt.format.tree import Node, SavedLeaf
from mpickpt.interop.dcp_storage.tree import METADATA_KEY
from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.load import Load, next_tag
from mpickpt.parallel.load_call import LoadCall, load_call
from mpickpt.parallel.match import Matched
from mpickpt.parallel.saved_ranks import SavedRanks
from mpickpt.parallel.waiting import Steps, run
from mpickpt.planning.flatten import FlatState, require_inside
from mpickpt.planning.wants import Place, Want

log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
Boxes = Mapping[str, Sequence[tuple[Hyperslab, Array]]]

_PHASE = "match"
_EVERYTHING = ("*",)


def read_tree(
    path: Any, comm: Any, timeout_s: float | None
) -> tuple[ShardManifest, Node]:
    """Return the manifest of a checkpoint and the union of the trees of its ranks.

    Notes
    -----
    Collective. Each rank reads the indexes of some shards.
    """
    talks = conversations_of(comm, timeout_s)
    call = load_call(path, reshard=True, only=_EVERYTHING)
    load = _TreeLoad(talks.load, call, next_tag(talks.memory))
    tree: Node = run(load.steps())
    assert load.manifest is not None
    return load.manifest, tree


def read_boxes(
    path: Any,
    comm: Any,
    boxes: Callable[[], Boxes],
    *,
    manifest: ShardManifest,
    partial: bool,
    verify: str | None,
    timeout_s: float | None,
) -> None:
    """Fill arrays with boxes of saved ones.

    Parameters
    ----------
    path : path-like or URL
        The checkpoint.
    comm : mpi4py.MPI.Intracomm or None
        The ranks that read, each what it wants.
    boxes : callable
        Returns, by key, boxes in the index space of the global array and the arrays
        to fill, of the saved dtype. What it raises is raised on all ranks.
    manifest : ShardManifest
        What is there to be read; another save may have replaced it.
    partial : bool
        Read only the blocks that hold what is wanted, verified by CRC-32; the same on
        all ranks.
    verify : {"sha256", "crc32", "none"}, optional
        As in `load_sharded`.
    timeout_s : float or None
        As in `load_sharded`.

    Notes
    -----
    Collective: every rank raises the same error.
    """
    only = _EVERYTHING if partial else None
    call = load_call(path, reshard=True, verify=verify, only=only)
    talks = conversations_of(comm, timeout_s)
    tag = next_tag(talks.memory)
    run(_BoxLoad(talks.load, call, tag, manifest, boxes).steps())


class _TreeLoad(Load):
    """A load that ends when the ranks know what was saved."""

    def load(self, manifest: ShardManifest) -> Steps[Any]:
        """Return the union of the trees."""
        ranks = SavedRanks(self.call.directory, manifest, _as_saved)
        if METADATA_KEY in manifest.metadata:
            # DcpWriter has given all ranks the same tree.
            yield from ranks.share_first(self.talk)
            return ranks.tree(0)
        own = self.own_shards(manifest)
        yield from self.talk.agree(
            lambda: self.read_indexes(manifest, ranks, own), "read indexes"
        )
        return (yield from ranks.merged(self.talk, own))


class _BoxLoad(Load):
    """A load of boxes that the program names."""

    def __init__(
        self,
        talk: Any,
        call: LoadCall,
        tag: int,
        expected: ShardManifest,
        boxes: Callable[[], Boxes],
    ) -> None:
        super().__init__(talk, call, tag)
        self.expected = expected
        self.boxes = boxes

    def match(
        self,
        manifest: ShardManifest,
        template: FlatState | None,
        ranks: SavedRanks,
        own: Sequence[int],
    ) -> Steps[Matched]:
        """Want the boxes."""
        wants = yield from self.talk.agree(lambda: self.wants(manifest), _PHASE)
        is_own = yield from self.talk.agree(
            lambda: self.is_own(manifest, ranks, wants), _PHASE
        )
        flags = yield from self.talk.allgather(bytes([is_own]), _PHASE)
        in_place = all(flag[0] for flag in flags)
        return Matched(wants=wants, build=_nothing, in_place=in_place)

    def wants(self, manifest: ShardManifest) -> list[Want]:
        """Return what this rank wants; raise if it is not there, or not so."""
        if manifest.checkpoint_id != self.expected.checkpoint_id:
            raise CheckpointError(
                f"{self.call.directory} was replaced by another save since its "
                "metadata was read; load again"
            )
        records = {record.key: record for record in manifest.arrays}
        boxes = self.boxes()
        unlisted = sorted(boxes.keys() - records.keys())
        if unlisted:
            raise ManifestError(
                f"{self.call.directory}: the tree has the array {unlisted[0]!r}, which "
                "the manifest does not list"
            )
        return [_want(records[key], wanted) for key, wanted in boxes.items()]

    def is_own(
        self, manifest: ShardManifest, ranks: SavedRanks, wants: Sequence[Want]
    ) -> bool:
        """Tell whether this rank wants only boxes that it saved itself."""
        if manifest.world_size != self.talk.size:
            return False
        index = ranks.reader(self.talk.rank).index
        held = {array.key: {part.box for part in array.parts} for array in index.arrays}
        return all(
            box in held.get(want.key, ()) or box.is_empty
            for want in wants
            for box, _ in want.targets
        )

    def say_what_is_verified(self) -> None:
        """Let rank 0 say that SHA-256, which needs whole shards, is not compared."""
        if self.talk.rank == 0:
            log.info(
                "reading a part of %s: the blocks that hold it, verified by CRC-32",
                self.call.directory,
            )


def _want(record: ArrayRecord, boxes: Sequence[tuple[Hyperslab, Array]]) -> Want:
    shape = record.global_shape
    if shape is None:
        raise ManifestError(f"the manifest lists {record.key!r} as each rank's own")
    for box, array in boxes:
        require_inside(record.key, box.shape, shape, box.offset)
        if dtype_name(array.dtype) != record.dtype:
            raise LayoutError(
                f"{record.key!r} is now {record.dtype}, but {array.dtype} was expected",
                key=record.key,
            )
    leaf = SavedLeaf(record.key, record.kind, record.dtype, shape)
    return Want(leaf, list(boxes), Place())


def _as_saved(tree: Node) -> Node:
    return tree


def _nothing() -> None:
    return None
