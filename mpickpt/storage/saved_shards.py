"""Opens those shards of a checkpoint that are needed; files, but no MPI and no HDF5."""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

from mpickpt.errors import CheckpointError, ManifestError
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.index import IndexArray
from mpickpt.format.layout_document import LayoutEntry
from mpickpt.format.records import ArrayRecord, ShardManifest
from mpickpt.storage.catalog import is_new
from mpickpt.storage.layout_file import read_layout
from mpickpt.storage.places import Place, each
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.shard_reader import BlockCache, ShardReader

log = logging.getLogger(__name__)

# An index of 10,000 arrays takes about 10 MB of memory.
_SHARDS_KEPT = 64


class SavedShards:
    """The shards that one manifest names, opened when they are needed.

    Parameters
    ----------
    directory : Path or RemotePath
        Directory of the checkpoint.
    manifest : ShardManifest
        Its manifest.
    """

    def __init__(self, directory: Place, manifest: ShardManifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self._is_new = is_new(manifest)
        self._blocks = BlockCache()
        self._shards: OrderedDict[int, ShardReader] = OrderedDict()

    def of(self, rank: int) -> ShardReader:
        """Return the shard of a saved rank."""
        shard = self._shards.pop(rank, None)
        if shard is None:
            record = self._manifest.shards[rank]
            size = self._manifest.world_size
            shard = ShardReader(
                self._directory, record, size, self._blocks, is_new=self._is_new
            )
        self._shards[rank] = shard
        if len(self._shards) > _SHARDS_KEPT:
            self._shards.popitem(last=False)
        return shard

    def with_indexes(self, ranks: Sequence[int]) -> Iterator[ShardReader]:
        """Yield the shards of saved ranks, which are going to be asked for their index.

        From a store indexes are read many at a time: each is little but a wait.
        """
        for start in range(0, len(ranks), _SHARDS_KEPT):
            shards = [self.of(rank) for rank in ranks[start : start + _SHARDS_KEPT]]
            if isinstance(self._directory, RemotePath):
                each(attrgetter("index"), shards, within=self._directory)
            yield from shards

    def require_sizes(self) -> None:
        """Raise unless every shard is there and has the bytes that were saved."""
        shards = map(self.of, range(self._manifest.world_size))
        each(ShardReader.require_size, shards, within=self._directory)

    def holding(self, key: str, box: Hyperslab) -> Iterator[ShardReader]:
        """Yield the shards that can hold elements in a box of an array, in rank order.

        Parameters
        ----------
        key : str
            Key of the array.
        box : Hyperslab
            In the index space of the global array.
        """
        return map(self.of, self._ranks_with(key, box))

    def _ranks_with(self, key: str, box: Hyperslab) -> Iterable[int]:
        """Return the ranks whose shards can hold elements in a box of an array."""
        if box.is_empty:
            return ()
        size = self._manifest.world_size
        entry = None if self._layout is None else self._layout.get(key)
        if entry is None:
            return range(size)
        hit = {rank for rank, part in entry.parts if _meet(part, box)}
        return sorted(rank for rank in hit if rank < size)

    @cached_property
    def _layout(self) -> dict[str, LayoutEntry] | None:
        record = self._manifest.layout
        if record is None:
            return None
        try:
            return read_layout(self._directory, record)
        except CheckpointError as error:
            # The indexes of all shards say the same, at the price of reading them.
            log.warning("asking every shard, because of its layout file: %s", error)
            return None


def matching_parts(shard: ShardReader, record: ArrayRecord) -> Any:
    """Return the parts of an array in a shard, whose index must fit the manifest."""
    array: IndexArray | None = shard.arrays.get(record.key)
    if array is None:
        return ()
    require_same(shard, array, record)
    return array.parts


def require_same(shard: ShardReader, array: IndexArray, record: ArrayRecord) -> None:
    """Raise unless index and manifest say the same of an array.

    Shape and dtype of what is per rank may differ between ranks.
    """
    found: tuple[Any, ...] = (array.kind, array.dtype, array.shape)
    listed: tuple[Any, ...] = (record.kind, record.dtype, record.global_shape)
    if found != listed and not found[0] == listed[0] == "per_rank":
        raise ManifestError(
            f"{shard.path}: {record.key!r} is {found}; the manifest says {listed}"
        )


def _meet(part: Hyperslab, box: Hyperslab) -> bool:
    return part.ndim == box.ndim and part.intersect(box) is not None
