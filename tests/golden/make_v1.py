"""Saves the golden checkpoint of format version 1: ``python -m tests.golden.make_v1``.

The files are written once. Whoever changes the format adds a version beside them.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from mpickpt import Replicated, save_sharded
from mpickpt.planning import sharing
from tests.golden import state_v1
from tests.ranks_as_threads import run_ranks

HERE = Path(__file__).parent
V1 = HERE / "v1"
V1_X87 = HERE / "v1_x87"
V1_EXAMPLE = HERE / "v1_example"


def save_v1(path: Path) -> None:
    """Save the state of two ranks; replicas of more than 32 bytes in parts."""

    def save(comm: Any) -> None:
        save_sharded(
            state_v1.state(comm.rank, comm.size),
            path,
            step=state_v1.STEP,
            comm=comm,
            metadata=state_v1.METADATA,
            metrics=state_v1.METRICS,
        )

    usual, sharing.MIN_PART_NBYTES = sharing.MIN_PART_NBYTES, 32
    try:
        outcomes = run_ranks(state_v1.SIZE, save)
    finally:
        sharing.MIN_PART_NBYTES = usual
    for failure in filter(None, outcomes):
        raise failure


def x87_state() -> dict[str, Any]:
    """Return the types that only the x87 long double has, on one rank."""
    numbers = np.array([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan], np.longdouble)
    arrays = [numbers, numbers / 3, numbers.astype(np.clongdouble)]
    swapped = [array.astype(array.dtype.newbyteorder(">")) for array in arrays]
    return {"little": Replicated(arrays), "big": Replicated(swapped)}


def save_v1_x87(path: Path) -> None:
    """Save the long doubles of this machine, which must be those of the x87."""
    save_sharded(x87_state(), path, step=0)


def save_v1_example(path: Path) -> None:
    """Save the worked example of FORMAT.md."""
    numbers = np.array([1, 2, 3], np.float32)
    save_sharded({"w": Replicated(numbers), "lr": 0.1}, path, step=7)


SAVERS = {V1: save_v1, V1_X87: save_v1_x87, V1_EXAMPLE: save_v1_example}

if __name__ == "__main__":
    for path, save in SAVERS.items():
        if path.exists():
            sys.exit(f"{path} exists; golden files are written once")
        save(path)
