"""Loads on another number of ranks: bytes read, and time against a plain load."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpickpt.bench.bench import Array, Bench, Reading, random_bytes
from mpickpt.bench.ranks import Ranks
from mpickpt.bench.rounds import Timings, Way, take_turns
from mpickpt.bench.rows import Row, at_most, not_run
from mpickpt.format.hyperslab import even_block
from mpickpt.parallel.load import load_sharded
from mpickpt.parallel.save import save_sharded
from mpickpt.state import Sharded

GROUP = "reshard"
PAIRS = ((4, 6), (6, 4), (4, 1), (1, 4))
# The indexes apart, which may be a hundredth of the checkpoint.
MOST_READ = at_most(1.01)
LONGEST = at_most(1.3)
_COMMAND = f"mpiexec -n 6 mpickpt bench --only {GROUP}"
_ITEMSIZE = 4
# As much as two ranks of the other measurements have.
_SIZES = 2


def measure_reshard(bench: Bench) -> list[Row]:
    """Measure each pair of world sizes that there are ranks for."""
    return [row for saved, now in PAIRS for row in _measure_pair(bench, saved, now)]


def _measure_pair(bench: Bench, saved: int, now: int) -> list[Row]:
    subject = f"reshard {saved}->{now}"
    read, lasted = f"{subject}, bytes read, times the checkpoint", f"{subject}, time"
    lasted += f", times a load by {min(saved, now)}"
    if bench.ranks.size < max(saved, now):
        why = f"needs {max(saved, now)} ranks: {_COMMAND}"
        return [
            not_run(GROUP, read, why, MOST_READ),
            not_run(GROUP, lasted, why, LONGEST),
        ]
    bench.clear()
    plain_name = f"load by {min(saved, now)}"
    with _World(bench, saved, now).ways() as (resharding, plain):
        reading = Reading(resharding)
        timings = take_turns(
            bench.ranks,
            {subject: reading, plain_name: plain},
            repeat=bench.repeat,
            before=lambda: bench.forget_pages(bench.directory),
        )
        nbytes, is_from_disk = reading.nbytes(bench.ranks)
    return [
        Row(
            group=GROUP,
            subject=read,
            value=nbytes / _shard_nbytes(bench.directory / f"by-{saved}"),
            target=MOST_READ,
            how="counted at the disk, cold" if is_from_disk else "counted at read()",
        ),
        _time_row(timings, lasted, (subject, plain_name)),
    ]


def _time_row(timings: Timings, subject: str, names: tuple[str, str]) -> Row:
    return Row(
        group=GROUP,
        subject=subject,
        value=timings.ratio(*names),
        target=LONGEST,
        how=", ".join(map(timings.millis_text, names)),
        seconds=timings.seconds,
    )


@dataclass(frozen=True, slots=True)
class _World:
    """The ranks of one pair, each with its block of one global array."""

    bench: Bench
    saved: int
    now: int

    @contextmanager
    def ways(self) -> Iterator[tuple[Way, Way]]:
        """Save for both ways; yield the way that reshards, and the plain one."""
        few = min(self.saved, self.now)
        with self.bench.ranks.first(self.saved) as part:
            self._save(part)
        if few != self.saved:
            with self.bench.ranks.first(few) as part:
                self._save(part)
        with (
            self.bench.ranks.first(self.now) as part,
            self.bench.ranks.first(few) as few_part,
        ):
            block = self._block(part)
            plain_block = block if few == self.now else self._block(few_part)
            yield (
                lambda: self._load(part, block, self.saved),
                lambda: self._load(few_part, plain_block, few),
            )

    @property
    def _count(self) -> int:
        return _SIZES * self.bench.nbytes // _ITEMSIZE

    def _block(self, part: Ranks | None) -> Array | None:
        if part is None:
            return None
        box = even_block((self._count,), part.rank, part.size)
        assert box is not None
        rng = np.random.default_rng(self.bench.ranks.rank)
        return random_bytes(rng, box.size * _ITEMSIZE).view(np.float32)

    def _save(self, part: Ranks | None) -> None:
        if part is not None:
            tree = {"w": Sharded.block(self._block(part))}
            save_sharded(tree, self._path(part.size), step=0, comm=part.comm)
        self.bench.ranks.barrier()

    def _load(self, part: Ranks | None, block: Array | None, saved: int) -> None:
        if part is not None:
            load_sharded(
                self._path(saved),
                comm=part.comm,
                like={"w": Sharded.block(block)},
                reshard=True,
            )

    def _path(self, saved: int) -> Path:
        return self.bench.directory / f"by-{saved}"


def _shard_nbytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.rglob("rank*.h5"))
