"""Finds the true boxes of what Megatron-core below 0.14 has flattened; pure.

The state of its distributed optimizer is cut at any element. An array of shape (X, Y),
each rank's block of which has shape (x, y), was stored with shape (X / x, Y / y, x y),
and the last axis cut.
"""

import math

from mpickpt.errors import ManifestError
from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.interop.sources.flat_range import boxes_of_flat_range
from mpickpt.interop.sources.tree import SourceArray, SourceChunk, SourceRun
from mpickpt.state import Shape


def unflattened(array: SourceArray, shape: Shape) -> SourceArray:
    """Return an array with its true shape, whose chunks say which boxes they are.

    Parameters
    ----------
    array : SourceArray
        As stored, of shape (X_0 / x_0, ..., X_{d-1} / x_{d-1}, x_0 ... x_{d-1}).
    shape : tuple of int
        The true one, (X_0, ..., X_{d-1}).

    Raises
    ------
    ManifestError
        If the two do not fit, or a chunk is more than part of one block.
    """
    *counts, length = array.shape or (0,)
    fits = len(counts) == len(shape) and all(
        count and n % count == 0 for n, count in zip(shape, counts, strict=True)
    )
    if not fits:
        raise _unfit(array, shape)
    block = tuple(n // count for n, count in zip(shape, counts, strict=True))
    if math.prod(block) != length:
        raise _unfit(array, shape)
    chunks = tuple(
        _with_runs(chunk, block, array) for chunk in array.chunks if chunk.shape[-1]
    )
    return SourceArray(array.key, array.dtype, shape, chunks)


def _with_runs(chunk: SourceChunk, block: Shape, array: SourceArray) -> SourceChunk:
    *index, start = chunk.offset
    *extent, length = chunk.shape
    if any(n != 1 for n in extent):
        raise _unfit(array, chunk.shape)
    first = tuple(i * n for i, n in zip(index, block, strict=True))
    if length == math.prod(block):
        boxes = [(whole(block), 0)]
    else:
        boxes = boxes_of_flat_range(block, start, start + length)
    runs = tuple(
        SourceRun(_moved(box, first), box.shape, max(0, at - start))
        for box, at in boxes
    )
    return SourceChunk(chunk.offset, chunk.shape, chunk.item, chunk.ordinal, runs)


def _moved(box: Hyperslab, first: Shape) -> Shape:
    return tuple(a + b for a, b in zip(box.offset, first, strict=True))


def _unfit(array: SourceArray, shape: Shape) -> ManifestError:
    return ManifestError(
        f"{array.key!r} is stored flattened in shape {array.shape}, which does not fit "
        f"{shape}; load and save it once with Megatron-core 0.14 or later"
    )
