"""Sees all shards of one checkpoint as one state; files, but no MPI and no HDF5."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from mpickpt.errors import ManifestError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.format.index import StoredPart
from mpickpt.format.naming import Path as KeyPath
from mpickpt.format.naming import key_of
from mpickpt.format.records import ArrayRecord, ShardManifest
from mpickpt.format.tree import Node, SavedLeaf, VariesNode
from mpickpt.planning.merge import digest_of, merge, saved_tree, skeleton
from mpickpt.planning.plain_values import is_by_rank, paths_by_rank, plain_value
from mpickpt.planning.tree_walk import find
from mpickpt.storage.array_reader import (
    Array,
    allocate,
    copy_part,
    part_pieces,
    read_selection,
    require_backed,
    require_tiling,
)
from mpickpt.storage.places import Place
from mpickpt.storage.saved_shards import SavedShards, matching_parts, require_same
from mpickpt.storage.selection import Selection, select
from mpickpt.storage.shard_reader import ShardReader

T = TypeVar("T")


class SavedState:
    """The state that one manifest describes; files are read when they are needed.

    Parameters
    ----------
    directory : Path or RemotePath
        Directory of the checkpoint.
    manifest : ShardManifest
        Its manifest.
    """

    def __init__(self, directory: Place, manifest: ShardManifest) -> None:
        self.manifest = manifest
        self.records = {record.key: record for record in manifest.arrays}
        self.shards = SavedShards(directory, manifest)

    def require_listed(self, rank: int) -> None:
        """Raise unless the manifest lists every array of one shard, as it is."""
        shard = self.shards.of(rank)
        for array in shard.index.arrays:
            require_same(shard, array, _listed(self.records, array.key))

    def tree_of(self, rank: int) -> Node:
        """Return the tree that one rank saved."""
        return saved_tree(self.shards.of(rank).index)

    @cached_property
    def tree(self) -> Node:
        """The union of the trees of all ranks.

        Where values differ between ranks, and within `PerRank`, a `VariesNode` stands.
        All indexes are read for it, once.
        """
        merged = self.tree_of(0)
        if self.manifest.world_size == 1:
            return merged
        merged, _ = skeleton(merged)
        seen = {digest_of(merged)}
        others = range(1, self.manifest.world_size)
        for shard in self.shards.with_indexes(others):
            tree, _ = skeleton(saved_tree(shard.index))
            digest = digest_of(tree)
            if digest not in seen:
                seen.add(digest)
                merged = merge([merged, tree])
        return merged

    def find(self, path: KeyPath) -> Node | None:
        """Return the node of the merged tree at a path; None where no rank has it."""
        node = find(self.tree, path)
        if node is not None:
            return node
        above = (find(self.tree, path[:length]) for length in range(len(path)))
        if any(is_by_rank(node) for node in above if node is not None):
            ranks = range(self.manifest.world_size)
            if any(find(self.tree_of(rank), path) is not None for rank in ranks):
                return VariesNode()
        return None

    def read(self, key: str, selection: Selection) -> Array:
        """Return selected elements of a sharded or replicated array."""
        record = _listed(self.records, key)
        stored = [
            (shard, part)
            for shard in self.shards.holding(key, selection.box)
            for part in matching_parts(shard, record)
        ]
        return read_selection(key, parse_dtype(record.dtype), selection, stored)

    def read_own(self, rank: int, key: str, selection: Selection) -> Array:
        """Return selected elements of the per-rank array of one rank."""
        shard = self.shards.of(rank)
        array = shard.arrays[key]
        stored = [(shard, part) for part in array.parts]
        return read_selection(key, parse_dtype(array.dtype), selection, stored)

    def load(self, path: KeyPath, node: Node) -> Any:
        """Return the subtree at a path as plain containers with whole arrays.

        Parameters
        ----------
        path : tuple
            Where it is.
        node : Node
            What `find` gave for it.
        """
        by_rank = list(paths_by_rank(node, path))
        arrays = self._assemble(self._records_below(path))
        values = self._values_by_rank(by_rank, arrays)

        def whole_array(leaf: SavedLeaf) -> Array:
            return _listed(arrays, leaf.key)

        def value(node: Node, path: KeyPath) -> Any:
            if path in values:
                return values[path]
            return plain_value(node, whole_array, value, path)

        return value(node, path)

    def value_of_rank(self, rank: int, path: KeyPath) -> Any:
        """Return what one rank had at a path: of sharded arrays its own boxes.

        Raises
        ------
        KeyError
            If it had nothing there.
        """
        node = find(self.tree_of(rank), path)
        if node is None:
            raise KeyError(f"rank {rank} has no {key_of(path)!r}")
        return self.value_of_node(rank, node)

    def value_of_node(self, rank: int, node: Node) -> Any:
        """Return what a node of one rank's tree stands for, its arrays read."""
        return plain_value(node, lambda leaf: self._held(rank, leaf))

    def fill(self, key: str, out: Array) -> None:
        """Fill an array, of the right shape and dtype, with a whole saved array."""
        self._fill([self.records[key]], {key: out})

    def pieces(self, keys: Sequence[str]) -> Iterator[tuple[str, Hyperslab, Array]]:
        """Yield the elements of whole arrays; each shard is read once, in file order.

        Raises
        ------
        KeyError
            If one is no array, or another on each of several ranks.
        """
        records = [self._one_array(key) for key in keys]
        dtypes = {record.key: parse_dtype(record.dtype) for record in records}
        tiles: dict[str, list[Hyperslab]] = {key: [] for key in dtypes}
        for shard, key, part in self._in_file_order(records):
            tiles[key].append(part.box)
            for box, elements in part_pieces(shard, part, dtypes[key]):
                yield key, box, elements
        for record in records:
            shape = record.global_shape
            if shape is not None:
                require_tiling(record.key, whole(shape), tiles[record.key])

    def stored_boxes(self, key: str) -> list[Hyperslab]:
        """Return the boxes of an array as they lie in the shards, in rank order.

        They tile it, and the shards are long enough to hold it.
        """
        record = self.records[key]
        room = whole(_shape(record))
        shards = list(self.shards.holding(key, room))
        boxes = [part.box for one in shards for part in matching_parts(one, record)]
        require_tiling(key, room, [box for box in boxes if not box.is_empty])
        available = sum(shard.record.nbytes for shard in shards)
        require_backed(key, room.size * parse_dtype(record.dtype).itemsize, available)
        return boxes

    def _held(self, rank: int, leaf: SavedLeaf) -> Any:
        if leaf.kind == "per_rank":
            return self._own(rank, leaf)
        boxes = self.shards.of(rank).arrays[leaf.key].boxes
        held = [self.read(leaf.key, select(b.slices(), leaf.shape)) for b in boxes]
        return held[0] if len(held) == 1 else held

    def _own(self, rank: int, leaf: SavedLeaf) -> Array:
        return self.read_own(rank, leaf.key, select(..., leaf.shape))

    def _values_by_rank(
        self, paths: Sequence[KeyPath], arrays: dict[str, Array]
    ) -> dict[KeyPath, list[Any]]:
        size = self.manifest.world_size
        values: dict[KeyPath, list[Any]] = {path: [None] * size for path in paths}
        for rank in range(size if paths else 0):
            tree = self.tree_of(rank)

            def leaf_value(leaf: SavedLeaf, rank: int = rank) -> Any:
                own = leaf.kind == "per_rank"
                return self._own(rank, leaf) if own else _listed(arrays, leaf.key)

            for path in paths:
                node = find(tree, path)
                if node is not None:
                    values[path][rank] = plain_value(node, leaf_value)
        return values

    def _assemble(self, records: Sequence[ArrayRecord]) -> dict[str, Array]:
        """Return whole arrays; each shard is read once, from its start to its end."""
        if records:
            self.shards.require_sizes()
        available = self.manifest.nbytes
        out: dict[str, Array] = {}
        for record in records:
            shape, dtype = _shape(record), parse_dtype(record.dtype)
            require_backed(record.key, whole(shape).size * dtype.itemsize, available)
            out[record.key] = allocate(record.key, shape, dtype)
            available -= out[record.key].nbytes
        self._fill(records, out)
        return out

    def _fill(self, records: Sequence[ArrayRecord], out: dict[str, Array]) -> None:
        boxes: dict[str, list[Hyperslab]] = {key: [] for key in out}
        for shard, key, part in self._in_file_order(records):
            boxes[key].append(part.box)
            copy_part(shard, part, select(..., out[key].shape), out[key])
        for key, tiles in boxes.items():
            require_tiling(key, whole(out[key].shape), tiles)

    def _one_array(self, key: str) -> ArrayRecord:
        record = self.records.get(key)
        if record is None:
            raise KeyError(f"{key!r} is no array of this checkpoint")
        if record.kind == "per_rank" and self.manifest.world_size > 1:
            raise KeyError(f"{key!r} is another array on each rank")
        return record

    def _in_file_order(
        self, records: Sequence[ArrayRecord]
    ) -> Iterator[tuple[ShardReader, str, StoredPart]]:
        """Yield the parts that have elements, each shard from its start to its end."""
        for rank in range(self.manifest.world_size if records else 0):
            shard = self.shards.of(rank)
            stored = [
                (r.key, part) for r in records for part in matching_parts(shard, r)
            ]
            for key, part in sorted(stored, key=lambda pair: pair[1].file_offset or 0):
                if not part.box.is_empty:
                    yield shard, key, part

    def _records_below(self, path: KeyPath) -> list[ArrayRecord]:
        key = key_of(path)
        return [
            record
            for record in self.manifest.arrays
            if record.kind != "per_rank"
            and (not path or record.key == key or record.key.startswith(key + "/"))
        ]


def _listed(found: Mapping[str, T], key: str) -> T:
    try:
        return found[key]
    except KeyError as error:
        text = f"the tree of a shard has the array {key!r}, which the manifest has not"
        raise ManifestError(text) from error


def _shape(record: ArrayRecord) -> tuple[int, ...]:
    assert record.global_shape is not None, record.kind
    return record.global_shape
