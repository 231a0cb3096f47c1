"""Yields the bytes of a shard in file order and puts them back; does no I/O."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpickpt.format.dtypes import clear_padding
from mpickpt.format.hyperslab import Hyperslab, contiguous_pieces

if TYPE_CHECKING:
    from mpickpt.storage.shard_image import ShardImage

Array = np.ndarray[Any, Any]

# What is not one run of memory goes through copies that fit the cache.
_PIECE_NBYTES = 256 << 10


class Target(Protocol):
    """Bytes that can be assigned to, slice by slice."""

    def __setitem__(self, where: slice, content: memoryview, /) -> None: ...


def regions_before_table(
    image: "ShardImage", index: bytes, parts: Sequence[Array]
) -> list[tuple[int, bytes | Array]]:
    """Return offset and content of all that lies before the table, in file order.

    Raises
    ------
    ValueError
        If index or parts are not those that the image was built for.
    """
    if len(index) != image.index_nbytes:
        raise ValueError(
            f"the index has {len(index)} bytes; the image has room for "
            f"{image.index_nbytes}"
        )
    placed = zip(image.part_offsets, parts, strict=True)
    regions: list[tuple[int, bytes | Array]] = [
        (offset, content)
        for offset, content in image.static
        if offset < image.table_offset
    ]
    regions += [(offset, part) for offset, part in placed if offset is not None]
    regions.append((image.index_offset, index))
    regions.sort(key=lambda region: region[0])
    return regions


def bytes_after_table(image: "ShardImage") -> bytes:
    """Return what lies behind the table: metadata of HDF5, if there is any."""
    start = image.table_offset + image.table_nbytes
    tail = bytearray(image.nbytes - start)
    for offset, content in image.static:
        if offset >= start:
            tail[offset - start : offset - start + len(content)] = content
    return bytes(tail)


def pieces_of(content: bytes | Array) -> Iterable[memoryview]:
    """Return the bytes of a region in order, as views or as small copies.

    Notes
    -----
    A C-ordered array is viewed, never copied. Others, and long doubles, whose
    padding must be zeroed, are copied piece by piece; the array is not modified.
    """
    if isinstance(content, bytes):
        return (memoryview(content),)
    is_padded = content.dtype.type in (np.longdouble, np.clongdouble)
    if content.flags.c_contiguous and not is_padded:
        return (bytes_of(content),)
    return _copied_pieces(content)


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a C-ordered array of any dtype as bytes."""
    # Python's buffers know no datetime64 and no bfloat16: view them in numpy first.
    return array.reshape(-1).view(np.uint8).data


class Scatter:
    """Puts the bytes of parts of a shard into arrays, as `read_shard` delivers them.

    Parameters
    ----------
    placed : sequence of (int, ndarray)
        Offset in the file and array of each part, in any order; arrays are writable,
        of any memory order, and have the dtype and shape that were saved.
    """

    def __init__(self, placed: Sequence[tuple[int, Array]]) -> None:
        ordered = sorted(
            (region for region in placed if region[1].nbytes), key=lambda pair: pair[0]
        )
        self._starts = [offset for offset, _ in ordered]
        self._stops = [offset + array.nbytes for offset, array in ordered]
        self._targets = [target_of(array) for _, array in ordered]

    def __call__(self, offset: int, view: memoryview) -> None:
        """Take the bytes at `offset` of the file; those of no part are dropped."""
        stop = offset + len(view)
        number = max(0, bisect_right(self._starts, offset) - 1)
        while number < len(self._starts) and self._starts[number] < stop:
            start = self._starts[number]
            first, last = max(offset, start), min(stop, self._stops[number])
            if first < last:
                content = view[first - offset : last - offset]
                self._targets[number][first - start : last - start] = content
            number += 1


class _ScatteredArray:
    """Assigns bytes that come in order to an array that is not one run of memory."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self._boxes = contiguous_pieces(array.shape, array.itemsize, _PIECE_NBYTES)
        self._begin(next(self._boxes))

    def __setitem__(self, where: slice, content: memoryview) -> None:
        while content:
            count = min(len(content), len(self._bytes) - self._filled)
            self._bytes[self._filled : self._filled + count] = content[:count]
            self._filled += count
            content = content[count:]
            if self._filled == len(self._bytes):
                self._array[self._box.slices()] = self._piece
                self._begin(next(self._boxes, self._box))

    def _begin(self, box: Hyperslab) -> None:
        self._box = box
        self._piece = np.empty(box.shape, self._array.dtype)
        self._bytes = bytes_of(self._piece)
        self._filled = 0


def target_of(array: Array) -> Target:
    """Return what takes the bytes of an array as they are read, in order."""
    return bytes_of(array) if array.flags.c_contiguous else _ScatteredArray(array)


def _copied_pieces(array: Array) -> Iterator[memoryview]:
    for box in contiguous_pieces(array.shape, array.itemsize, _PIECE_NBYTES):
        piece = np.array(array[box.slices()], order="C")
        view = piece.reshape(-1).view(np.uint8)
        clear_padding(view, array.dtype)
        yield view.data
