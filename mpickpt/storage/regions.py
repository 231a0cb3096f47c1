"""Yields the bytes of a shard in file order; does no I/O."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpickpt.errors import StateTypeError
from mpickpt.format.dtypes import clear_padding
from mpickpt.format.hyperslab import Hyperslab, contiguous_pieces
from mpickpt.state import StreamedArray

if TYPE_CHECKING:
    from mpickpt.storage.shard_image import ShardImage

Array = np.ndarray[Any, Any]

Content = bytes | Array | StreamedArray
Region = tuple[int, Content]

# Of arrays of a few kilobytes each lies behind a header of its own; joined in one call,
# they cost half of what they cost one by one.
_SMALL_NBYTES = 32 << 10
_JOINED_NBYTES = 256 << 10
_PLAIN_TYPES = frozenset("?bBhHiIlLqQefdFD")  # whose arrays Python's buffers know

# What is not one run of memory goes through copies that fit the cache.
PIECE_NBYTES = 256 << 10
# What is read piece by piece, as it is written, wants larger ones.
_STREAMED_NBYTES = 1 << 20


def regions_before_table(
    image: "ShardImage", index: bytes, parts: Sequence[Array | StreamedArray]
) -> list[Region]:
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
    regions: list[Region] = [
        (offset, content)
        for offset, content in image.static
        if offset < image.table_offset
    ]
    regions += [(offset, part) for offset, part in placed if offset is not None]
    regions.append((image.index_offset, index))
    regions.sort(key=lambda region: region[0])
    return regions


def joined(regions: Iterable[Region]) -> Iterator[Region]:
    """Yield regions in file order, with small neighbours, and gaps between, joined."""
    start = end = 0
    run: list[Any] = []  # bytes and arrays, which are buffers
    for offset, content in regions:
        if run and (end - start > _JOINED_NBYTES or offset - end > _SMALL_NBYTES):
            yield start, b"".join(run)
            run = []
        if not _is_small(content):
            if run:
                yield start, b"".join(run)
                run = []
            yield offset, content
            continue
        if not run:
            start = offset
        elif offset > end:
            run.append(bytes(offset - end))
        run.append(content)
        end = offset + (len(content) if isinstance(content, bytes) else content.nbytes)
    if run:
        yield start, b"".join(run)


def _is_small(content: Content) -> bool:
    """Tell whether a region is little, and one run of memory."""
    if isinstance(content, bytes):
        return len(content) <= _SMALL_NBYTES
    if isinstance(content, StreamedArray):
        return False
    return (
        content.nbytes <= _SMALL_NBYTES
        and content.dtype.char in _PLAIN_TYPES
        and content.flags.c_contiguous
    )


def bytes_after_table(image: "ShardImage") -> bytes:
    """Return what lies behind the table: metadata of HDF5, if there is any."""
    start = image.table_offset + image.table_nbytes
    tail = bytearray(image.nbytes - start)
    for offset, content in image.static:
        if offset >= start:
            tail[offset - start : offset - start + len(content)] = content
    return bytes(tail)


def pieces_of(content: Content) -> Iterable[memoryview]:
    """Return the bytes of a region in order, as views or as small copies.

    Notes
    -----
    A C-ordered array is viewed, never copied. Others, and long doubles, whose
    padding must be zeroed, are copied piece by piece; the array is not modified.
    """
    if isinstance(content, bytes):
        return (memoryview(content),)
    if isinstance(content, StreamedArray):
        return (
            view for _, piece in streamed(content) for view in _copied_pieces(piece)
        )
    is_padded = content.dtype.type in (np.longdouble, np.clongdouble)
    if content.flags.c_contiguous and not is_padded:
        return (bytes_of(content),)
    return _copied_pieces(content)


def streamed(array: StreamedArray) -> Iterator[tuple[Hyperslab, Array]]:
    """Yield the boxes of an array that is read as it is written, with their elements.

    Raises
    ------
    StateTypeError
        A box came with another dtype or shape than was asked for.
    """
    for box in contiguous_pieces(array.shape, array.dtype.itemsize, _STREAMED_NBYTES):
        bounds = tuple(map(slice, box.offset, box.stop))
        piece = np.asarray(array.read(bounds))
        if piece.shape != box.shape or piece.dtype != array.dtype:
            raise StateTypeError(
                f"{type(array).__qualname__}.read returned {piece.dtype} of shape "
                f"{piece.shape} for {bounds}; expected {array.dtype} of shape "
                f"{box.shape}"
            )
        yield box, piece


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a C-ordered array of any dtype as bytes."""
    # Python's buffers know no datetime64 and no bfloat16: view them in numpy first. A
    # subclass may have a shape of its own mind: numpy.matrix is never flat.
    return np.asarray(array).reshape(-1).view(np.uint8).data


def _copied_pieces(array: Array) -> Iterator[memoryview]:
    array = np.asarray(array)
    for box in contiguous_pieces(array.shape, array.itemsize, PIECE_NBYTES):
        piece = np.array(array[box.slices()], order="C")
        view = piece.reshape(-1).view(np.uint8)
        clear_padding(view, array.dtype)
        yield view.data
