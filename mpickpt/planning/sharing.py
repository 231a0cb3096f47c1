"""Shares out by bytes who writes the boxes that several ranks hold; touches nothing."""

import zlib
from collections import defaultdict
from collections.abc import Sequence

from mpickpt.errors import LayoutError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.planning.layout import Share, sole
from mpickpt.planning.rank_grid import holders_of

MIN_PART_NBYTES = 1 << 20


def share_out(
    key: str, dtype: str, boxes: Sequence[Hyperslab], holders: Sequence[Sequence[int]]
) -> list[Share]:
    """Return who writes each box.

    Parameters
    ----------
    key : str
        Canonical key of the array.
    dtype : str
        Its dtype; "" for a plain value.
    boxes : sequence of Hyperslab
        Distinct boxes.
    holders : sequence of sequences of int
        For each box, the ranks that hold it, ascending, at least one.

    Returns
    -------
    list of Share
        A replica is written in parts of 1 MiB or more, by the least loaded holders.

    Raises
    ------
    LayoutError
        A dtype that this machine does not have.
    """
    if set(map(len, holders)) == {1}:
        return [sole(rank) for (rank,) in holders]
    pairs = list(zip(boxes, holders, strict=True))
    itemsize = _itemsize(key, dtype)
    loads: defaultdict[int, int] = defaultdict(int)
    for box, ranks in pairs:
        if len(ranks) == 1:
            loads[ranks[0]] += box.size
    return [_share(key, box, ranks, itemsize, loads) for box, ranks in pairs]


def _share(
    key: str,
    box: Hyperslab,
    ranks: Sequence[int],
    itemsize: int,
    loads: defaultdict[int, int],
) -> Share:
    if len(ranks) == 1:
        return sole(ranks[0])
    rows = box.shape[0] if box.shape else 1
    wished = box.size * itemsize // MIN_PART_NBYTES
    nparts = max(1, min(len(ranks), wished, rows))
    first = zlib.crc32(f"{key} {box.offset} {box.shape}".encode()) % len(ranks)
    weights = [loads[rank] for rank in (*ranks[first:], *ranks[:first])]
    start = (first + weights.index(min(weights))) % len(ranks)
    for i in range(nparts):
        loads[ranks[(start + i) % len(ranks)]] += box.size // nparts
    return Share(holders=holders_of(ranks), start=start, nparts=nparts)


def _itemsize(key: str, dtype: str) -> int:
    if not dtype:
        return 0
    try:
        return parse_dtype(dtype).itemsize
    except ValueError as error:
        raise LayoutError(f"array {key!r}: {error}", key=key) from error
