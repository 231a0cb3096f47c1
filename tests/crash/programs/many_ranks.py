"""MPI program: all ranks save and load; three quarters of them then reshard.

Arguments: directory, and the file for what was found.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpickpt import PerRank, Replicated, Sharded, load_sharded, save_sharded
from tests.crash.small_state import flat

COMM = MPI.COMM_WORLD
ROWS, COLUMNS, PLANES = 64 * 48 * 3, 16, 7


def field(shape: tuple[int, ...], start: int = 0) -> Any:
    """Return rows of a global array whose elements are their own numbers."""
    size = int(np.prod(shape))
    return np.arange(start, start + size, dtype=np.int64).reshape(shape)


def state(rank: int, size: int) -> dict[str, Any]:
    rows = ROWS // size
    first = rank * rows
    whole = (ROWS, COLUMNS)
    return {
        "field": Sharded(field((rows, COLUMNS), first * COLUMNS), whole, (first, 0)),
        "flat": Sharded.block(field((rows,), first).astype(np.float16)),
        "same": Replicated(field((PLANES, 1000))),
        "own": PerRank(np.full(rank % 3, rank)),
        "rank": PerRank(rank),
    }


def wanted_by(rank: int, size: int) -> dict[str, Any]:
    """Return a template for another number of ranks."""
    wanted = state(rank, size)
    for key in ("field", "flat", "same"):
        wanted[key].data[...] = -1
    wanted["own"] = PerRank(wanted["own"].data, on_resize="keep")
    wanted["rank"] = PerRank(rank, on_resize="keep")
    return wanted


def main() -> None:
    path, results = Path(sys.argv[1]), Path(sys.argv[2])
    rank, size = COMM.rank, COMM.size
    seconds = {}

    begin = time.monotonic()
    save_sharded(state(rank, size), path, step=1, comm=COMM)
    seconds["save"] = time.monotonic() - begin

    begin = time.monotonic()
    equal = flat(load_sharded(path, comm=COMM)) == flat(state(rank, size))
    seconds["load"] = time.monotonic() - begin

    fewer = size * 3 // 4
    part = COMM.Split(rank < fewer, rank)
    begin = time.monotonic()
    if rank < fewer:
        loaded = load_sharded(
            path, comm=part, like=wanted_by(rank, fewer), reshard=True
        )
        equal = equal and flat(loaded) == flat(state(rank, fewer))
    seconds["reshard"] = time.monotonic() - begin

    found = COMM.gather({"equal": equal, "rank": rank, "seconds": seconds})
    if rank == 0:
        results.write_text(json.dumps(found))


main()
