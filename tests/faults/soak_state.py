"""A state that is a pure function of step and rank, for runs that are judged later.

Any process on any number of ranks can tell whether what it read is, byte for byte,
what was saved at a step. No MPI here.
"""

from typing import Any

import numpy as np

from mpickpt import PerRank, Replicated, Sharded
from mpickpt.format.hyperslab import even_block

ROWS = 384
COLUMNS = 16
_MIX = np.uint64(0x9E3779B97F4A7C15)


def weights(step: int) -> np.ndarray:
    """Return the global sharded array of a step; no two elements or steps agree."""
    count = ROWS * COLUMNS
    numbers = np.arange(count, dtype=np.uint64) + np.uint64(step * count)
    return (numbers * _MIX).reshape(ROWS, COLUMNS)


def scale(step: int) -> np.ndarray:
    """Return the replicated array of a step."""
    return np.arange(97.0) + 1000.0 * step


def own(step: int, rank: int) -> np.ndarray:
    """Return the array that a rank has for itself at a step."""
    return np.array([step, rank, step ^ rank], dtype=np.int64)


class PureState:
    """What one rank holds; filled in place from step to step."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        box = even_block((ROWS, COLUMNS), rank, size)
        assert box is not None
        self._box = box
        self._weights = np.zeros(box.shape, dtype=np.uint64)
        self._scale = np.zeros(97)
        self._own = np.zeros(3, dtype=np.int64)
        self.step = -1

    def tree(self) -> dict[str, Any]:
        """Return the state tree."""
        return {
            "model": {
                "w": Sharded.block(self._weights),
                "scale": Replicated(self._scale),
            },
            "own": PerRank(self._own, on_resize="first"),
            "step": self.step,
        }

    def advance(self, step: int) -> None:
        """Do a step."""
        self.step = step
        self._weights[...] = weights(step)[self._box.slices()]
        self._scale[...] = scale(step)
        self._own[...] = own(step, self.rank)

    def wipe(self) -> None:
        """Forget everything, so that a load that fills nothing is seen."""
        self.step = -1
        for array in (self._weights, self._scale, self._own):
            array.fill(0)

    def problem(self, restored: Any, step: int, saved_size: int) -> str:
        """Tell what a load into `tree()` of a step got wrong; "" where nothing is."""
        rank = self.rank if saved_size == self.size else 0
        wanted = {
            "step": restored["step"] == step,
            "w": np.array_equal(self._weights, weights(step)[self._box.slices()]),
            "scale": np.array_equal(self._scale, scale(step)),
            "own": np.array_equal(self._own, own(step, rank)),
        }
        wrong = [name for name, is_right in wanted.items() if not is_right]
        return f"step {step}: wrong bytes in {', '.join(wrong)}" if wrong else ""


def global_problem(loaded: Any, world_size: int) -> str:
    """Tell what is wrong with a state that one process loaded whole."""
    step = loaded["step"]
    rows = list(loaded["own"])
    wanted = {
        "w": np.array_equal(loaded["model"]["w"], weights(step)),
        "scale": np.array_equal(loaded["model"]["scale"], scale(step)),
        "own": len(rows) == world_size
        and all(np.array_equal(row, own(step, r)) for r, row in enumerate(rows)),
    }
    wrong = [name for name, is_right in wanted.items() if not is_right]
    return f"step {step}: wrong bytes in {', '.join(wrong)}" if wrong else ""
