"""Reads parts of one shard, verified, without HDF5: its index and ranges of bytes."""

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

from mpickpt.errors import (
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
)
from mpickpt.format.digest import (
    BLOCK_NBYTES,
    TABLE_ITEM_NBYTES,
    block_at,
    crc32,
    crc32_hex,
    n_blocks,
)
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.index import IndexArray, ShardIndex, parse_index
from mpickpt.format.records import ShardRecord
from mpickpt.storage.places import (
    OpenFile,
    Place,
    open_to_read,
    require_real_directory,
)
from mpickpt.storage.second_look import is_gone
from mpickpt.storage.stream import verified_range

# No index of a real state comes near; a hostile one must not fill the memory. The
# table of a shard of a petabyte has this length.
MAX_INDEX_NBYTES = 1 << 30
_MAX_TABLE_NBYTES = 256 << 20
_MOST_KEYS = 8


class BlockCache:
    """Keeps the last few verified blocks, for reads that touch one block often.

    Parameters
    ----------
    capacity : int
        Number of blocks, of 16 MiB each.

    Notes
    -----
    Thread-safe.
    """

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[Place, int], bytearray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Place, number: int) -> bytearray | None:
        """Return a block that was put, unless it was dropped since."""
        with self._lock:
            block = self._blocks.get((path, number))
            if block is not None:
                self._blocks.move_to_end((path, number))
            return block

    def put(self, path: Place, number: int, block: bytearray) -> None:
        """Keep a verified block; the one that was used least recently goes."""
        with self._lock:
            self._blocks[path, number] = block
            while len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._blocks.clear()


class ShardReader:
    """One shard of a checkpoint.

    Parameters
    ----------
    directory : Path or RemotePath
        Directory of the checkpoint.
    record : ShardRecord
        What the manifest says of the shard.
    world_size : int
        Number of ranks that saved.
    blocks : BlockCache
        Shared by the shards of a checkpoint.
    is_new : bool
        Whether the checkpoint was published a moment ago, maybe by another node.
    """

    def __init__(
        self,
        directory: Place,
        record: ShardRecord,
        world_size: int,
        blocks: BlockCache,
        *,
        is_new: bool = False,
    ) -> None:
        self.path = directory / record.path
        self.record = record
        self._directory = directory
        self._world_size = world_size
        self._blocks = blocks
        self._is_new = is_new
        self._is_known = False
        self._index: ShardIndex | None = None
        self._table: tuple[int, ...] | None = None

    @property
    def index(self) -> ShardIndex:
        """The index, verified by the manifest."""
        # A `cached_property` of Python 3.11 lets one thread read at a time, of all
        # shards; then a store would be asked for one index after the other.
        if self._index is None:
            self._index = self._parsed(self.index_text())
        return self._index

    def index_text(self) -> bytes:
        """Return the bytes of the index, read anew and verified by the manifest."""
        offset, nbytes, crc = self.record.index
        self._require_moderate("index", nbytes, MAX_INDEX_NBYTES)
        return self._range(offset, nbytes, crc)

    def take_index(self, text: bytes) -> None:
        """Use an index that another process has read, rather than open the shard."""
        self._index = self._parsed(text)

    def _parsed(self, text: bytes) -> ShardIndex:
        index = parse_index(text, nbytes=self.record.nbytes, where=str(self.path))
        if (index.rank, index.world_size) != (self.record.rank, self._world_size):
            raise ManifestError(
                f"{self.path} is the shard of rank {index.rank} of "
                f"{index.world_size}; expected rank {self.record.rank} of "
                f"{self._world_size}"
            )
        return index

    @cached_property
    def arrays(self) -> dict[str, IndexArray]:
        """The array records of the index by key."""
        return {array.key: array for array in self.index.arrays}

    @property
    def table(self) -> tuple[int, ...]:
        """The CRC-32 of every block, verified by the manifest."""
        if self._table is None:
            self._table = self._read_table()
        return self._table

    def _read_table(self) -> tuple[int, ...]:
        offset, nbytes = self.index.table
        after = self.record.nbytes - offset - nbytes
        count = n_blocks(offset) + n_blocks(after)
        if nbytes != count * TABLE_ITEM_NBYTES:
            raise ManifestError(
                f"{self.path}: a table of {nbytes} bytes at {offset}; expected "
                f"{TABLE_ITEM_NBYTES} for each of {count} blocks"
            )
        self._require_moderate("table", nbytes, _MAX_TABLE_NBYTES)
        content = self._range(offset, nbytes, self.record.crc32)
        return struct.unpack(f"<{count}I", content)

    def require_size(self) -> None:
        """Raise unless the file is there and has the bytes that were saved."""
        with self.open():
            pass

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        """Open the file for reading; regular, inside the checkpoint, of that size.

        A store is asked for the size once: what it keeps under the name of a shard
        never changes.

        Raises
        ------
        IncompleteCheckpointError
            If it is missing or has another size.
        StorageError
            If it or its directory is a symlink, a FIFO or a device.
        """
        if self.path.parent != self._directory:
            require_real_directory(self.path.parent)
        with open_to_read(
            self.path,
            nbytes=self.record.nbytes,
            is_new=self._is_new,
            is_known=self._is_known,
        ) as file:
            self._is_known = True
            yield file

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill `target` with the bytes of the shard from `start`, verified.

        Raises
        ------
        CorruptShardError
            If a block that is touched differs from its CRC-32.
        """
        done = 0
        while done < len(target):
            offset = start + done
            number = block_at(offset, *self.index.table, self.record.nbytes)
            if number is None:
                raise ManifestError(
                    f"{self.path}: byte {offset} belongs to no array, but the index "
                    "places one there; it was not written by mpickpt"
                )
            first, _ = self.block_range(number)
            chunk = memoryview(self._block(number))[offset - first :]
            taken = min(len(chunk), len(target) - done)
            target[done : done + taken] = chunk[:taken]
            done += taken

    def block_range(self, number: int) -> tuple[int, int]:
        """Return the (start, stop) of a block, in bytes of the file."""
        table_offset, table_nbytes = self.index.table
        n_before = n_blocks(table_offset)
        if number < n_before:
            start, end = number * BLOCK_NBYTES, table_offset
        else:
            table_end = table_offset + table_nbytes
            start = table_end + (number - n_before) * BLOCK_NBYTES
            end = self.record.nbytes
        return start, min(start + BLOCK_NBYTES, end)

    def keys_in(self, start: int, stop: int) -> tuple[str, ...]:
        """Return the keys of the arrays that have bytes in a range of the file."""
        return tuple(
            array.key
            for array in sorted(self.index.arrays, key=lambda array: array.key)
            if any(first < stop and start < last for first, last in _spans(array))
        )

    def corrupt_block(self, number: int, actual: int) -> CorruptShardError:
        """Return the error for a block whose CRC-32 is not the saved one."""
        start, stop = self.block_range(number)
        keys = self.keys_in(start, stop)
        held = f", which holds {_listed(keys)}" if keys else ""
        expected = crc32_hex(self.table[number])
        return CorruptShardError(
            f"{self.path} is damaged: block {number}, bytes {start} to {stop}{held}, "
            f"should have CRC-32 {expected} and has {crc32_hex(actual)}",
            path=str(self.path),
            expected=expected,
            actual=crc32_hex(actual),
        )

    def _block(self, number: int) -> bytearray:
        block = self._blocks.get(self.path, number)
        if block is not None:
            return block
        expected = self.table[number]
        start, stop = self.block_range(number)
        block = bytearray(stop - start)
        with self.open() as file:
            file.read_at(memoryview(block), start)
        actual = crc32(block)
        if actual != expected:
            raise self.corrupt_block(number, actual)
        self._blocks.put(self.path, number, block)
        return block

    def _range(self, offset: int, nbytes: int, expected: str) -> bytes:
        """Return a range of the file, verified; opened once, for a server counts."""
        with self.open() as file:
            return verified_range(file, offset, nbytes, expected)

    def _require_moderate(self, what: str, nbytes: int, most: int) -> None:
        if nbytes > most:
            raise ManifestError(
                f"{self.path}: an {what} of {nbytes} bytes; at most {most} are read"
            )


def is_vanished(error: Exception) -> bool:
    """Tell whether an error can mean that the checkpoint was replaced or deleted."""
    return is_gone(error) or isinstance(error, IncompleteCheckpointError)


def _spans(array: IndexArray) -> Iterator[tuple[int, int]]:
    itemsize = parse_dtype(array.dtype).itemsize
    for part in array.parts:
        if part.file_offset is not None:
            yield part.file_offset, part.file_offset + part.box.size * itemsize


def _listed(keys: tuple[str, ...]) -> str:
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return ", ".join(map(repr, keys[:_MOST_KEYS])) + more
