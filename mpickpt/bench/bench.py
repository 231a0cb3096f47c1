"""What all measurements share: ranks, a place, and a state of random bytes."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpickpt.bench.counters import nbytes_asked_for, nbytes_from_disk
from mpickpt.bench.ranks import Ranks
from mpickpt.bench.rounds import Timings, Way, take_turns
from mpickpt.parallel.save import save_sharded
from mpickpt.state import Sharded

Array = np.ndarray[Any, Any]

# As of parameters in half precision, their copies in single, and two moments.
_KINDS = (
    ("model/w", np.float16, 2),
    ("adam/fp32", np.float32, 4),
    ("adam/m", np.float32, 4),
    ("adam/v", np.float32, 4),
)
_KINDS_NBYTES = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One run of the benchmark, as one rank sees it.

    Parameters
    ----------
    ranks : Ranks
        Those that measure.
    directory : Path
        For them alone.
    arrays : dict of str to ndarray
        This rank's state.
    repeat : int
        Number of rounds.
    """

    ranks: Ranks
    directory: Path
    arrays: dict[str, Array]
    repeat: int

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's state."""
        return sum(array.nbytes for array in self.arrays.values())

    @property
    def total_nbytes(self) -> int:
        """Bytes of all ranks' states; all have the same."""
        return self.nbytes * self.ranks.size

    @property
    def checkpoint(self) -> Path:
        """Where the ways that save put their checkpoint."""
        return self.directory / "checkpoint"

    @property
    def own_file(self) -> Path:
        """Where this rank puts a file of its own."""
        return self.directory / f"file-{self.ranks.rank:05d}"

    @property
    def words(self) -> str:
        """How large all this is: "2 ranks x 512 MiB"."""
        return f"{self.ranks.size} ranks x {self.nbytes / 2**20:.3g} MiB"

    def state(self) -> dict[str, Sharded]:
        """Return the state as the library saves it, and loads it in place."""
        return {name: Sharded.block(array) for name, array in self.arrays.items()}

    def save(self) -> None:
        """Save the state."""
        save_sharded(self.state(), self.checkpoint, step=0, comm=self.ranks.comm)

    def smaller(self, nbytes: int) -> "Bench":
        """Return the same with at most so many bytes of state."""
        arrays = incompressible(min(nbytes, self.nbytes), seed=self.ranks.rank)
        return replace(self, arrays=arrays)

    def take_turns(self, ways: dict[str, Way]) -> Timings:
        """Time ways that write, each in an empty directory."""
        return take_turns(self.ranks, ways, repeat=self.repeat, before=self.clear)

    def take_turns_cold(self, ways: dict[str, Way]) -> Timings:
        """Time ways that read the checkpoint, each without the page cache."""
        return take_turns(
            self.ranks, ways, repeat=self.repeat, before=self.forget_pages
        )

    def clear(self) -> None:
        """Remove what was written, and let the disk finish with it."""
        self.ranks.barrier()
        if self.ranks.rank == 0:
            for path in self.directory.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        self.ranks.barrier()

    def forget_pages(self, *checkpoints: Path) -> None:
        """Drop files from the page cache; they were synced when they were written."""
        self.ranks.barrier()
        if self.ranks.rank == 0:
            for directory in checkpoints or (self.checkpoint,):
                _forget_pages(directory.rglob("*"))
        self.ranks.barrier()


class Reading:
    """Counts what a way that reads has fetched from the disk, over all its calls."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._from_disk: list[int] = []
        self._asked_for: list[int] = []

    def __call__(self) -> None:
        """Read."""
        from_disk, asked_for = nbytes_from_disk(), nbytes_asked_for()
        self._way()
        self._from_disk.append(nbytes_from_disk() - from_disk)
        self._asked_for.append(nbytes_asked_for() - asked_for)

    def nbytes(self, ranks: Ranks) -> tuple[float, bool]:
        """Return the bytes of one call of all ranks, and whether a disk gave them.

        Notes
        -----
        Collective. File systems without a disk count only what was asked for.
        """
        calls = max(1, len(self._from_disk))
        from_disk = ranks.total(sum(self._from_disk)) / calls
        asked_for = ranks.total(sum(self._asked_for)) / calls
        return (from_disk, True) if from_disk else (asked_for, False)


def incompressible(nbytes: int, seed: int) -> dict[str, Array]:
    """Return random arrays of about so many bytes together, of odd lengths."""
    rng = np.random.default_rng(seed)
    count = max(1, nbytes // _KINDS_NBYTES)
    return {
        name: random_bytes(rng, count * itemsize).view(dtype)
        for name, dtype, itemsize in _KINDS
    }


def random_bytes(rng: np.random.Generator, nbytes: int) -> Array:
    """Return bytes that no file system can compress or find twice."""
    words = rng.integers(0, 2**64, -(-nbytes // 8), dtype=np.uint64)
    return words.view(np.uint8)[:nbytes]


def _forget_pages(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
