"""Finds the boxes of a DTensor in its global tensor: any mesh, any placements.

Several ranks that hold the same box are replicas to the core, so `Replicate` needs
nothing of its own. Knows torch's placements, not its process groups.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from mpickpt.errors import LayoutError, StateTypeError
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.interop.torch.tensors import Array, numpy_dtype
from mpickpt.state import Shape, Sharded

Span = tuple[int, int]  # start in the global tensor, length
Split = tuple[int, int]  # dimension of the tensor, split factor
ArrayOf = Callable[[Any], Array]


def is_dtensor(value: Any) -> bool:
    """Tell whether a value is a DTensor, without importing what makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_of(dtensor: Any) -> Any:
    """Return this rank's part of a DTensor; the two share their elements."""
    with torch.no_grad():
        local = dtensor.to_local()
    wait = getattr(local, "wait", None)  # the result of a collective under way
    return local if wait is None else wait()


def whole_of(tensor: Any, name: str) -> Any:
    """Return a tensor without axes, which every rank has, as a plain tensor."""
    if not is_dtensor(tensor):
        return tensor
    local = local_of(tensor)
    boxes_of(tensor, local, name)
    return local


def sharded_of(dtensor: Any, name: str, array_of: ArrayOf) -> Sharded:
    """Return a DTensor as this rank's boxes of a global array.

    Parameters
    ----------
    dtensor : DTensor
        Of any mesh; this rank need not be in it.
    name : str
        Where it is, for messages.
    array_of : callable
        Gives the array of the local tensor.
    """
    local = local_of(dtensor)
    boxes = boxes_of(dtensor, local, name)
    pieces = []
    if boxes:
        array = array_of(local)
        pieces = [(there.offset, array[here.slices()]) for there, here in boxes]
    shape = tuple(dtensor.shape)
    return Sharded.pieces(pieces, global_shape=shape, dtype=numpy_dtype(dtensor.dtype))


def filled_boxes(
    dtensor: Any, sharded: Sharded, name: str
) -> Iterator[tuple[Any, Array]]:
    """Yield each part of the local tensor with the array that belongs there.

    Raises
    ------
    LayoutError
        The arrays are not those of the boxes that this rank holds.
    """
    saved = sharded.boxes
    if saved is None:
        saved = ((sharded.offset or (), sharded.data),)
    arrays = {tuple(offset): array for offset, array in saved}
    local = local_of(dtensor)
    for there, here in boxes_of(dtensor, local, name):
        array = arrays.get(there.offset)
        if array is None or tuple(array.shape) != there.shape:
            raise LayoutError(
                f"{name!r}: this rank holds the box of shape {there.shape} at "
                f"{there.offset}, which is not among what was loaded; pass "
                "reshard=True to redistribute",
                key=name,
            )
        yield local[here.slices()], array


def boxes_of(
    dtensor: Any, local: Any, name: str
) -> tuple[tuple[Hyperslab, Hyperslab], ...]:
    """Return the boxes with elements that this rank holds of a DTensor.

    Parameters
    ----------
    dtensor : DTensor
        Of any mesh; this rank need not be in it.
    local : torch.Tensor
        Its part on this rank.
    name : str
        Where it is, for messages.

    Returns
    -------
    tuple of (Hyperslab, Hyperslab)
        The box in the global tensor, and the same one in the local tensor.

    Raises
    ------
    StateTypeError
        A placement that says not which elements a rank holds, as partial sums do.
    """
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    shape = tuple(dtensor.shape)
    splits = tuple(_split_of(p, len(shape), name) for p in dtensor.placements)
    place = (shape, tuple(mesh.shape), tuple(coordinate), splits)
    boxes = placed_boxes(*place)
    if tuple(local.shape) != local_shape(*place) and (boxes or local.numel()):
        raise StateTypeError(
            f"{name!r}: placements {dtensor.placements} of {shape} do not give this "
            f"rank a local tensor of {tuple(local.shape)}; was it made by from_local "
            "with parts of other sizes?",
            key=name,
        )
    return boxes


def _split_of(placement: Any, ndim: int, name: str) -> Split | None:
    """Return how a placement splits a dimension; None where it replicates."""
    if placement.is_replicate():
        return None
    factor = getattr(placement, "split_factor", 1)
    if placement.is_partial() or not hasattr(placement, "dim"):
        raise StateTypeError(
            f"{name!r} has the placement {placement}: ranks hold parts of a sum, not "
            "elements; redistribute it to Shard or Replicate first",
            key=name,
        )
    return int(placement.dim) % ndim, int(factor)


@lru_cache(maxsize=1 << 12)
def placed_boxes(
    shape: Shape, mesh: Shape, coordinate: Shape, splits: tuple[Split | None, ...]
) -> tuple[tuple[Hyperslab, Hyperslab], ...]:
    """Return the boxes that one rank of a mesh holds; pure.

    Parameters
    ----------
    shape : tuple of int
        Of the global tensor, (N_0, ..., N_{d-1}).
    mesh, coordinate : tuple of int
        Ranks along each dimension of the mesh, and where this rank is.
    splits : tuple of (dimension, split factor) or None
        What each dimension of the mesh does to the tensor, applied in order.

    Returns
    -------
    tuple of (Hyperslab, Hyperslab)
        Each box with elements: in the global tensor, and in the local one.
    """
    spans = _spans(shape, mesh, coordinate, splits)
    located = [list(_located(_joined(axis))) for axis in spans]
    boxes = []
    for combination in itertools.product(*located):
        sizes = tuple(n for _, _, n in combination)
        if all(sizes):
            there = Hyperslab(tuple(start for start, _, _ in combination), sizes)
            here = Hyperslab(tuple(place for _, place, _ in combination), sizes)
            boxes.append((there, here))
    return tuple(boxes)


@lru_cache(maxsize=1 << 12)
def local_shape(
    shape: Shape, mesh: Shape, coordinate: Shape, splits: tuple[Split | None, ...]
) -> Shape:
    """Return the shape of one rank's part; see `placed_boxes`."""
    spans = _spans(shape, mesh, coordinate, splits)
    return tuple(sum(length for _, length in axis) for axis in spans)


def _spans(
    shape: Shape, mesh: Shape, coordinate: Shape, splits: tuple[Split | None, ...]
) -> list[list[Span]]:
    """Return the indices that one rank has along each dimension."""
    spans: list[list[Span]] = [[(0, n)] for n in shape]
    for count, index, split in zip(mesh, coordinate, splits, strict=True):
        if split is not None:
            dim, factor = split
            spans[dim] = _part(spans[dim], factor, count, index)
    return spans


def _part(spans: Sequence[Span], factor: int, count: int, index: int) -> list[Span]:
    """Return the part that one of `count` ranks takes of the indices of a dimension.

    With a split factor each of so many chunks is split among the ranks, as where
    tensor parallelism has split the dimension before FSDP does.
    """
    taken: list[Span] = []
    for chunk in _chunks(spans, factor):
        taken += _chunks(chunk, count)[index]
    return taken


def _chunks(spans: Sequence[Span], count: int) -> list[list[Span]]:
    """Split indices as `torch.chunk` does: equal lengths, the last ones shorter."""
    total = sum(length for _, length in spans)
    size = -(-total // count)
    return [_cut(spans, k * size, (k + 1) * size) for k in range(count)]


def _cut(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return the spans of the indices from the start-th to the stop-th."""
    cut, before = [], 0
    for first, length in spans:
        low, high = max(start - before, 0), min(stop - before, length)
        if low < high:
            cut.append((first + low, high - low))
        before += length
    return cut


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Join spans that follow each other: fewer boxes are stored."""
    joined: list[Span] = []
    for first, length in spans:
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((first, length))
    return joined


def _located(spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """Yield start in the global tensor, start in the local one, and length."""
    place = 0
    for first, length in spans:
        yield first, place, length
        place += length
