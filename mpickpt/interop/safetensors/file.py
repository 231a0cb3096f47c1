"""Writes tensors to their places in a safetensors file, box by box; knows no tree."""

import math
import operator
import os
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from mpickpt.format.hyperslab import Hyperslab
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.shard_file import ShardFile


def write_box(
    out: ShardFile,
    start: int,
    shape: tuple[int, ...],
    box: Hyperslab,
    elements: np.ndarray[Any, Any],
) -> None:
    """Write the elements of a box to their places in a tensor, run by run.

    Parameters
    ----------
    out : ShardFile
        The file.
    start : int
        First byte of the tensor in it.
    shape : tuple of int
        Shape of the tensor, which lies in C order.
    box : Hyperslab
        Where the elements are in it.
    elements : ndarray
        Of the shape of the box.
    """
    if box.is_empty:
        return
    itemsize = elements.dtype.itemsize
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    axis = _first_axis_of_runs(shape, box.shape)
    begin = start + _dot(box.offset, strides)
    content = np.ascontiguousarray(elements).view(np.uint8).reshape(-1).data
    run_nbytes = len(content) // math.prod(box.shape[:axis])
    done = 0
    with storage_errors("write", out.path):
        for place in _places(box.shape[:axis], strides, begin):
            run = content[done : done + run_nbytes]
            # There may be millions of runs, so this goes by the shortest way.
            if os.pwrite(out.descriptor, run, place) != run_nbytes:
                out.write_at(run, place)
            done += run_nbytes


def _places(
    outer: tuple[int, ...], strides: Sequence[int], begin: int
) -> Iterator[int]:
    """Yield where the runs begin, of which there is one for each outer index."""
    if not outer:
        yield begin
        return
    stride = strides[len(outer) - 1]
    for index in product(*map(range, outer[:-1])):
        first = begin + _dot(index, strides)
        yield from range(first, first + outer[-1] * stride, stride)


def _first_axis_of_runs(shape: tuple[int, ...], part: tuple[int, ...]) -> int:
    """Return the axis from which a box of an array is without gaps in it.

    That is the last one on which the box is not as long as the array.
    """
    partial = [axis for axis in range(len(shape)) if part[axis] != shape[axis]]
    return partial[-1] if partial else 0


def _dot(index: tuple[int, ...], strides: Sequence[int]) -> int:
    # An index of the first axes only goes with their strides.
    return sum(map(operator.mul, index, strides))
