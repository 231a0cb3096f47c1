"""Shares out work over ranks by bytes, to the rank on certain nodes that has least."""

import heapq
from collections.abc import Collection, Sequence


class RankLoads:
    """How many bytes each rank has to move so far.

    Parameters
    ----------
    node_of : sequence of int
        The node of each rank, from 0.
    """

    def __init__(self, node_of: Sequence[int]) -> None:
        self._nbytes = [0] * len(node_of)
        self._everywhere = [(0, rank) for rank in range(len(node_of))]
        self._on_node: list[list[tuple[int, int]]] = [
            [] for _ in range(max(node_of, default=-1) + 1)
        ]
        for rank, node in enumerate(node_of):
            self._on_node[node].append((0, rank))

    def lightest(self, nodes: Collection[int]) -> int:
        """Return the rank with the least work on some nodes; on all, if none is given.

        Of ranks with as much it is the lowest.
        """
        heaps = [self._on_node[node] for node in nodes] or [self._everywhere]
        return min(map(self._first, heaps))[1]

    def add(self, rank: int, nbytes: int) -> None:
        """Give a rank so many bytes more."""
        self._nbytes[rank] += nbytes

    def _first(self, heap: list[tuple[int, int]]) -> tuple[int, int]:
        # Loads only grow, so an entry that is out of date sorts too early, never late.
        while heap[0][0] != self._nbytes[heap[0][1]]:
            rank = heap[0][1]
            heapq.heapreplace(heap, (self._nbytes[rank], rank))
        return heap[0]
