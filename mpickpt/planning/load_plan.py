"""Decides who reads what and who needs it, when ranks or boxes changed; no I/O, no MPI.

Boxes are in the index space of one global array, lengths in elements.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from mpickpt.format.corners import corner_arrays
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.planning.rank_loads import RankLoads
from mpickpt.planning.tiling import first_wrong_corner

Transfer = tuple[int, int, Hyperslab]
Indices = npt.NDArray[np.int64]
Corners = tuple[Indices, Indices]

# Candidate pairs that are held at once: 4 Mi pairs of 3-D boxes are about 400 MB.
_MAX_PAIRS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """What must go from stored boxes to wanted ones, a row for each pair that meets.

    Attributes
    ----------
    stored, wanted : ndarray of int64, shape (n,)
        Positions of the two boxes; rows ascend by the two.
    offsets, shapes : ndarray of int64, shape (n, ndim)
        The box that both cover.
    """

    stored: Indices
    wanted: Indices
    offsets: Indices
    shapes: Indices


def transfers_between(have: Corners, need: Corners) -> Transfers:
    """Return what must go from each stored box to each wanted one.

    Parameters
    ----------
    have, need : pair of ndarray of int64, shape (boxes, ndim)
        First and end corners of at least one stored and one wanted box. Stored ones
        have no common elements, wanted ones may overlap; empty ones take no part.

    Notes
    -----
    The cost follows the boxes and the pairs that meet, where some axis tells the
    boxes apart.
    """
    found = [_intersections(have, need, i, j) for i, j in _candidates(have, need)]
    i, j, offsets, shapes = map(np.concatenate, zip(*found, strict=True))
    order = np.lexsort((j, i))
    return Transfers(
        stored=i[order], wanted=j[order], offsets=offsets[order], shapes=shapes[order]
    )


def plan_transfers(
    stored: Sequence[Hyperslab], wanted: Sequence[Hyperslab]
) -> list[Transfer]:
    """Return what must go from each stored box to each wanted one.

    Parameters
    ----------
    stored : sequence of Hyperslab
        Boxes of the checkpoint, pairwise without common elements.
    wanted : sequence of Hyperslab
        Boxes of the current ranks, of the same ndim; they may overlap.

    Returns
    -------
    list of (int, int, Hyperslab)
        Position in `stored`, position in `wanted`, and the box that both cover,
        ordered by the two positions. Empty boxes take no part.
    """
    if not stored or not wanted:
        return []
    if len(stored) == len(wanted) == 1:
        both = stored[0].intersect(wanted[0])
        return [] if both is None else [(0, 0, both)]
    found = transfers_between(corner_arrays(stored), corner_arrays(wanted))
    boxes = map(Hyperslab, _rows(found.offsets), _rows(found.shapes))
    return list(zip(found.stored.tolist(), found.wanted.tolist(), boxes, strict=True))


def _rows(indices: Indices) -> Iterable[tuple[int, ...]]:
    if not indices.shape[1]:
        return repeat((), len(indices))
    return zip(*indices.T.tolist(), strict=True)


def uncovered(need: Corners, transfers: Transfers) -> tuple[int, ...] | None:
    """Return an index that is wanted and that no stored box holds.

    Parameters
    ----------
    need : pair of ndarray of int64
        As given to `transfers_between`.
    transfers : Transfers
        What it returned.

    Returns
    -------
    tuple of int or None
        In the first wanted box that is not filled, the first such index in C order:
        () where the array has no axes, so compare with None. None where all is there.
    """
    filled = np.zeros(len(need[0]), dtype=np.int64)
    np.add.at(filled, transfers.wanted, transfers.shapes.prod(axis=1))
    for j in np.flatnonzero(filled != (need[1] - need[0]).prod(axis=1)):
        own = transfers.wanted == j
        offsets = transfers.offsets[own]
        starts = np.concatenate([need[0][j : j + 1], offsets])
        stops = np.concatenate([need[1][j : j + 1], offsets + transfers.shapes[own]])
        wrong = first_wrong_corner(starts, stops)
        return wrong[0] if wrong else None
    return None


def assign_shards(
    nbytes: Sequence[int],
    size: int,
    *,
    holders: Sequence[Collection[int]] | None = None,
    node_of: Sequence[int] | None = None,
) -> list[int]:
    """Return which rank reads each saved shard, so that all read about as much.

    Parameters
    ----------
    nbytes : sequence of int
        Length of each saved shard, in bytes, by saved rank.
    size : int
        Number of ranks that read.
    holders : sequence of collection of int, optional
        The nodes that have each shard on a disk of their own; by default all ranks
        are as near to all shards.
    node_of : sequence of int, optional
        The node of each rank, where `holders` are given.

    Returns
    -------
    list of int
        Reading rank of each shard. In a world of the same size each rank reads its
        own; else the largest shard left always goes to the rank with the least, of
        those on a node that has it.
    """
    if len(nbytes) == size:
        return list(range(size))
    near = holders if holders is not None else [()] * len(nbytes)
    loads = RankLoads(node_of if node_of is not None else [0] * size)
    readers = [0] * len(nbytes)
    # What only few can read at home goes first: the others can make up for it.
    order = [(len(near[i]) or size, -nbytes[i], i) for i in range(len(nbytes))]
    for _, _, shard in sorted(order):
        rank = readers[shard] = loads.lightest(near[shard])
        loads.add(rank, nbytes[shard])
    return readers


def _candidates(have: Corners, need: Corners) -> Iterator[tuple[Indices, Indices]]:
    """Yield positions of boxes that may meet, found on the most selective axis."""
    n_have, n_need = len(have[0]), len(need[0])
    ndim = have[0].shape[1]
    everything = np.arange(n_have), np.zeros(n_need, int), np.full(n_need, n_have)
    order, low, high = min(
        (_reached(have, need, axis) for axis in range(ndim)),
        key=lambda reached: int((reached[2] - reached[1]).sum()),
        default=everything,
    )
    for chunk in _chunks(high - low):
        counts = (high - low)[chunk]
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) - np.repeat(ends - counts - low[chunk], counts)
        yield order[places], np.repeat(np.arange(n_need)[chunk], counts)


def _reached(
    have: Corners, need: Corners, axis: int
) -> tuple[Indices, Indices, Indices]:
    """Return an order of the boxes we have, and for each one needed a range in it.

    What lies outside the range does not meet the needed box on this axis.
    """
    starts, stops = have[0][:, axis], have[1][:, axis]
    order = np.argsort(starts, kind="stable")
    # Stops need not ascend in this order, but the farthest stop so far does.
    farthest = np.maximum.accumulate(stops[order])
    low = np.searchsorted(farthest, need[0][:, axis], side="right")
    high = np.searchsorted(starts[order], need[1][:, axis], side="left")
    # An empty needed box can end before what it starts after.
    return order, low, np.maximum(low, high)


def _chunks(counts: Indices) -> Iterator[slice]:
    """Yield ranges of positions whose counts add up to a bounded number of pairs."""
    ends = np.cumsum(counts)
    first = done = 0
    while first < len(counts):
        stop = int(np.searchsorted(ends, done + _MAX_PAIRS, side="right"))
        stop = max(stop, first + 1)
        yield slice(first, stop)
        first, done = stop, int(ends[stop - 1])


def _intersections(
    have: Corners, need: Corners, i: Indices, j: Indices
) -> tuple[Indices, Indices, Indices, Indices]:
    """Return those pairs that meet, with offset and shape of what both cover."""
    offsets = np.maximum(have[0][i], need[0][j])
    shapes = np.minimum(have[1][i], need[1][j]) - offsets
    meets = (shapes > 0).all(axis=1)
    return i[meets], j[meets], offsets[meets], shapes[meets]
