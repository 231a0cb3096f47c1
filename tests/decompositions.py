"""Random ways to cut a global array into the boxes that ranks hold or want."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpickpt import Sharded

Box = tuple[tuple[int, ...], tuple[int, ...]]


def tiles(rand: random.Random, shape: tuple[int, ...], most: int) -> list[Box]:
    """Return at most `most` random boxes that tile an array."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    while len(boxes) < most:
        number = rand.randrange(len(boxes))
        offset, extent = boxes[number]
        axes = [axis for axis, length in enumerate(extent) if length > 1]
        if not axes:
            break
        axis = rand.choice(axes)
        cut = rand.randrange(1, extent[axis])
        boxes[number : number + 1] = _cut(offset, extent, axis, cut)
    return boxes


def grid(rand: random.Random, shape: tuple[int, ...], most: int) -> list[Box]:
    """Return the boxes of a grid with uneven cuts along every axis."""
    boxes: list[Box] = [((), ())]
    for length in shape:
        n_cuts = rand.randrange(most) if length > 1 else 0
        cuts = sorted({0, length, *(rand.randrange(1, length) for _ in range(n_cuts))})
        spans = list(itertools.pairwise(cuts)) or [(0, 0)]
        boxes = [
            ((*offset, start), (*extent, stop - start))
            for offset, extent in boxes
            for start, stop in spans
        ]
    return boxes


def decomposition(
    rand: random.Random, shape: tuple[int, ...], size: int
) -> list[list[Box]]:
    """Return, for each rank, boxes that tile an array: several, empty, copies, none."""
    make = rand.choice([tiles, grid])
    held: list[list[Box]] = [[] for _ in range(size)]
    for box in make(rand, shape, rand.randrange(1, 5)):
        n_holders = rand.choice([1, 1, 1, rand.randint(1, size)])
        for rank in rand.sample(range(size), n_holders):
            held[rank].append(box)
    for boxes in held:
        if shape and rand.randrange(3) == 0:
            boxes.append((tuple(rand.randint(0, n) for n in shape), (0,) * len(shape)))
        rand.shuffle(boxes)
    return held


def wishes(rand: random.Random, shape: tuple[int, ...]) -> list[Box]:
    """Return boxes of an array, as they come: they may overlap and leave gaps."""
    boxes = []
    for _ in range(rand.randrange(4)):
        starts = tuple(rand.randint(0, length) for length in shape)
        extent = tuple(
            rand.randint(0, n - start) for n, start in zip(shape, starts, strict=True)
        )
        boxes.append((starts, extent))
    return boxes


def sharded(boxes: Sequence[Box], array: np.ndarray) -> Sharded:
    """Return the boxes of a global array, as one rank holds them."""
    pieces = [(offset, array[slices(offset, extent)]) for offset, extent in boxes]
    if len(pieces) == 1:
        return Sharded(pieces[0][1], array.shape, pieces[0][0])
    return Sharded.pieces(pieces, global_shape=array.shape, dtype=array.dtype)


def slices(offset: Sequence[int], extent: Sequence[int]) -> tuple[Any, ...]:
    """Return the index of a box; the ellipsis keeps 0-d arrays arrays."""
    inside = (slice(o, o + n) for o, n in zip(offset, extent, strict=True))
    return (*inside, ...)


def _cut(offset: Any, extent: Any, axis: int, cut: int) -> list[Box]:
    first, second, start = list(extent), list(extent), list(offset)
    first[axis] = cut
    second[axis] = extent[axis] - cut
    start[axis] = offset[axis] + cut
    return [(offset, tuple(first)), (tuple(start), tuple(second))]
