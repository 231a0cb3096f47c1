"""Reads boxes of arrays out of shards, with numpy's indexing; knows no tree."""

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from mpickpt.errors import LayoutError, ManifestError
from mpickpt.format.digest import BLOCK_NBYTES
from mpickpt.format.hyperslab import Hyperslab, contiguous_pieces, whole
from mpickpt.format.index import StoredPart
from mpickpt.planning.tiling import first_wrong_index
from mpickpt.storage.selection import Overlap, Selection, select
from mpickpt.storage.shard_reader import ShardReader

Array = np.ndarray[Any, Any]
DType = np.dtype[Any]
Stored = tuple[ShardReader, StoredPart]


class StoredArray:
    """An array in a checkpoint, read piece by piece as it is indexed.

    Parameters
    ----------
    key, kind : str
        As the manifest names them.
    dtype : dtype
        Type of the elements.
    shape : tuple of int
        Global shape.
    read : callable
        Gives the elements of a `Selection`.

    Notes
    -----
    Index with ints, slices of any step, `...`, and a list of ints or bools along one
    axis. Only the blocks that hold these elements are read, and each is verified.
    """

    def __init__(
        self,
        key: str,
        kind: str,
        dtype: DType,
        shape: tuple[int, ...],
        read: Callable[[Selection], Array],
    ) -> None:
        self.key = key
        self.kind = kind
        self.dtype = dtype
        self.shape = shape
        self._read = read

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return whole(self.shape).size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.key!r} has no axes, so it has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        selection = select(index, self.shape)
        return self._read(selection)[selection.finish]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self.key!r} lies in files; it cannot be had uncopied")
        array: Array = self[...]
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<StoredArray {self.key!r} {self.kind} {self.dtype} {self.shape}>"


def read_selection(
    key: str, dtype: DType, selection: Selection, stored: Iterable[Stored]
) -> Array:
    """Return the selected elements, before `finish`, out of the parts that hold them.

    Parameters
    ----------
    key : str
        For messages.
    dtype : dtype
        Type of the elements.
    selection : Selection
        In the index space of the global array.
    stored : iterable of (ShardReader, StoredPart)
        At least those parts that hold a wanted element.

    Raises
    ------
    LayoutError
        If the parts leave a gap in what is wanted, or overlap there.
    CorruptShardError, IncompleteCheckpointError, StorageError
        As the shards are.
    """
    box = selection.box
    if box.is_empty:
        return allocate(key, selection.shape, dtype)
    inside = [(shard, part, part.box.intersect(box)) for shard, part in stored]
    touched = [(shard, part, hit) for shard, part, hit in inside if hit is not None]
    require_tiling(key, box, [hit for *_, hit in touched])
    sizes = {shard.path: shard.record.nbytes for shard, *_ in touched}
    require_backed(key, box.size * dtype.itemsize, sum(sizes.values()))
    out = allocate(key, selection.shape, dtype)
    for shard, part, _ in touched:
        copy_part(shard, part, selection, out)
    return out


def copy_part(
    shard: ShardReader, part: StoredPart, selection: Selection, out: Array
) -> None:
    """Copy the selected elements of one part to their places in `out`."""
    if part.file_offset is None:
        return
    for piece in contiguous_pieces(part.box.shape, out.itemsize, BLOCK_NBYTES):
        offset = tuple(map(operator.add, piece.offset, part.box.offset))
        overlap = selection.within(Hyperslab(offset, piece.shape))
        if overlap is not None:
            before = _position(piece.offset, part.box.shape) * out.itemsize
            start = part.file_offset + before
            elements = _read_piece(shard, start, piece.shape, overlap, out.dtype)
            out[overlap.target] = elements[overlap.source]


def part_pieces(
    shard: ShardReader, part: StoredPart, dtype: DType
) -> Iterator[tuple[Hyperslab, Array]]:
    """Yield the elements of one part, in C order, at most a block at a time.

    Yields
    ------
    (Hyperslab, ndarray)
        Where they are in the global array, and the elements.
    """
    if part.file_offset is None:
        return
    for piece in contiguous_pieces(part.box.shape, dtype.itemsize, BLOCK_NBYTES):
        offset = tuple(map(operator.add, piece.offset, part.box.offset))
        before = _position(piece.offset, part.box.shape) * dtype.itemsize
        content = np.empty(piece.size * dtype.itemsize, np.uint8)
        shard.read_into(content.data, part.file_offset + before)
        elements = content.view(dtype).reshape(piece.shape)
        yield Hyperslab(offset, piece.shape), elements


def require_tiling(key: str, box: Hyperslab, tiles: list[Hyperslab]) -> None:
    """Raise `LayoutError` unless the tiles cover the box, each element once."""
    wrong = first_wrong_index(box, tiles)
    if wrong is None:
        return
    index, excess = wrong
    fault = "is in no shard" if excess < 0 else "is stored more than once"
    raise LayoutError(
        f"{key!r}: the element at {index} {fault}; the index of a shard does not fit "
        "the manifest",
        key=key,
    )


def require_backed(key: str, nbytes: int, available: int) -> None:
    """Raise unless the files are long enough to hold what they say they hold."""
    if nbytes > available:
        raise ManifestError(
            f"{key!r} would have {nbytes} bytes, but its shards have {available}; they "
            "were not written by mpickpt"
        )


def allocate(key: str, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return an array that is not filled yet."""
    try:
        return np.empty(shape, dtype)
    except ValueError as error:
        raise ManifestError(f"{key!r} has the shape {shape}: {error}") from error


def _read_piece(
    shard: ShardReader,
    start: int,
    shape: tuple[int, ...],
    overlap: Overlap,
    dtype: DType,
) -> Array:
    """Return a contiguous piece; what lies before and after what is wanted is left out.

    So no block is read that holds nothing but elements of the piece nobody wants.
    """
    lowest, highest = overlap.corners
    begin = _position(lowest, shape) * dtype.itemsize
    end = (_position(highest, shape) + 1) * dtype.itemsize
    content = np.empty(whole(shape).size * dtype.itemsize, np.uint8)
    shard.read_into(content.data[begin:end], start + begin)
    return content.view(dtype).reshape(shape)


def _position(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the number of an element in C order."""
    position = 0
    for i, n in zip(index, shape, strict=True):
        position = position * n + i
    return position
