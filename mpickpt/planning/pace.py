"""Spreads the creates and opens of a world over time; pure.

The metadata of a parallel file system is kept by one server or a few. Ten thousand
ranks that leave a collective together ask it for as many files within a millisecond,
and whoever else works on the machine waits behind them.
"""

from mpickpt.format.naming import RANKS_PER_DIRECTORY

# A Lustre server created fastest with 240 clients at it (`file_systems`): half as many
# are a burst to nobody.
AT_ONCE = 128
LONGEST_S = 10.0


def delay_s(
    rank: int, n_ranks: int, per_s: float | None, *, most_s: float = LONGEST_S
) -> float:
    """Return how long a rank waits before it creates or opens its file.

    Parameters
    ----------
    rank, n_ranks : int
        The rank, and how many there are.
    per_s : float or None
        How many files the job may create each second; None where it does not matter,
        as on a local disk.
    most_s : float
        The longest that any rank waits, in seconds. More ranks than fit go faster.

    Returns
    -------
    float
        Seconds, below `most_s`: 0 for all ranks of a small world, and the same at each
        call, so that no two ranks need to talk about it.

    Notes
    -----
    The ranks of one sub-directory go in their order, so that a node has one turn at
    the directory (GPFS hands the right to change it from node to node), and the
    sub-directories go side by side.
    """
    if per_s is None or n_ranks <= AT_ONCE:
        return 0.0
    return min(n_ranks / per_s, most_s) * _turn(rank, n_ranks) / n_ranks


def _turn(rank: int, n_ranks: int) -> int:
    """Return the place of a rank in the order: a permutation of the ranks."""
    n_full, n_in_last = divmod(n_ranks, RANKS_PER_DIRECTORY)
    directory, place = divmod(rank, RANKS_PER_DIRECTORY)
    return place * n_full + min(place, n_in_last) + directory
