"""Memory beyond the state: the peak during a call above what there was before it."""

import numpy as np

from mpickpt.bench.bench import Bench
from mpickpt.bench.counters import forget_peak, peak_nbytes, resident_nbytes
from mpickpt.bench.load import loading
from mpickpt.bench.rounds import Way
from mpickpt.bench.rows import Row, Target, at_most, not_run
from mpickpt.parallel.load import load_sharded
from mpickpt.parallel.manager import CheckpointManager
from mpickpt.state import Sharded

GROUP = "memory"
_MIB = 1 << 20
_SAVES = 50
_SMALL_NBYTES = 4 << 20
_MOST = at_most(64)
_MOST_RESHARDING = at_most(256)


def measure_memory(bench: Bench) -> list[Row]:
    """Measure a save, a load into place, a load on other ranks, and growth."""
    if not bench.ranks.from_root(forget_peak):
        why = "this system does not let the peak of memory be measured afresh"
        return [not_run(GROUP, "memory beyond the state", why, _MOST)]
    rows = [
        _row(bench, "a save", bench.save, _MOST),
        _row(bench, "a load into place", loading(bench, "sha256"), _MOST),
        _row_of_resharding(bench),
    ]
    return [*rows, _growth(bench)]


def _row(bench: Bench, subject: str, way: Way, target: Target) -> Row:
    worst = bench.ranks.largest(_extra_nbytes(way))
    return Row(
        group=GROUP,
        subject=f"memory of {subject}, above that before it",
        value=worst / _MIB,
        unit="MiB",
        target=target,
        how=f"peak of the worst rank, first call of the program; {bench.words}",
    )


def _extra_nbytes(way: Way) -> int:
    forget_peak()
    before = resident_nbytes()
    way()
    return peak_nbytes() - before


def _row_of_resharding(bench: Bench) -> Row:
    fewer = bench.ranks.size - 1
    subject = f"a reshard {fewer + 1}->{fewer}"
    if not fewer:
        return not_run(GROUP, subject, "needs 2 ranks", _MOST_RESHARDING)
    with bench.ranks.first(fewer) as part:
        like = _room_for(bench, fewer) if part is not None else {}

        def load() -> None:
            if part is not None:
                load_sharded(bench.checkpoint, comm=part.comm, like=like, reshard=True)

        return _row(bench, subject, load, _MOST_RESHARDING)


def _room_for(bench: Bench, size: int) -> dict[str, Sharded]:
    """Return arrays, already touched, that hold the state of all ranks on fewer."""
    return {
        # The first rank takes what does not divide; lengths may differ.
        name: Sharded.block(np.ones(_share(bench, array.size, size), array.dtype))
        for name, array in bench.arrays.items()
    }


def _share(bench: Bench, count: int, size: int) -> int:
    total = count * bench.ranks.size
    return total // size + (bench.ranks.rank < total % size)


def _growth(bench: Bench) -> Row:
    small = bench.smaller(_SMALL_NBYTES)
    small.clear()
    count, before = _SAVES * bench.repeat, 0
    with CheckpointManager(
        small.directory / "run", small.ranks.comm, state=small.state, keep=2
    ) as manager:
        for step in range(count):
            manager.save(step)
            if step == count // 5:
                manager.wait()
                before = resident_nbytes()
        manager.wait()
        grown = resident_nbytes() - before
    return Row(
        group=GROUP,
        subject="memory that the program grows by over many saves",
        value=small.ranks.largest(grown) / _MIB,
        unit="MiB",
        how=f"{count - count // 5} asynchronous saves, worst rank",
    )
