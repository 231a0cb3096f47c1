"""A state of very many small arrays: the first save of a program, and later ones."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from mpickpt.bench.bench import Bench, random_bytes
from mpickpt.bench.ranks import Ranks
from mpickpt.bench.rounds import Way
from mpickpt.bench.rows import Row
from mpickpt.parallel.save import save_sharded
from mpickpt.state import Sharded

GROUP = "many-arrays"
FIRST, LATER, ONE = "first save", "later save", "one array as large"
_COUNT = 10_000
_ARRAY_NBYTES = 4 << 10


def measure_many_arrays(bench: Bench) -> list[Row]:
    """Measure what many arrays cost beside one array of the same bytes."""
    with saves_of_many_arrays(bench) as (ways, count):
        timings = bench.take_turns(ways)
    millis = ", ".join(map(timings.millis_text, (FIRST, LATER, ONE)))
    return [
        Row(
            group=GROUP,
            subject=f"{name}, {count:,} arrays x 4 KiB per rank, times as long as one",
            value=timings.ratio(name, ONE),
            how=millis,
            seconds=timings.seconds if name == FIRST else {},
        )
        for name in (FIRST, LATER)
    ]


@contextmanager
def saves_of_many_arrays(bench: Bench) -> Iterator[tuple[dict[str, Way], int]]:
    """Yield the ways to save many small arrays, and how many a rank has."""
    state = many_arrays(bench)
    one = {"all": Sharded.block(np.concatenate([leaf.data for leaf in state.values()]))}

    def save(ranks: Ranks, tree: dict[str, Sharded]) -> None:
        save_sharded(tree, bench.checkpoint, step=0, comm=ranks.comm)

    def save_first() -> None:
        with bench.ranks.afresh() as ranks:
            save(ranks, state)

    with ExitStack() as stack:
        # What one save remembers of its layout, the other would make it forget.
        many, single = (stack.enter_context(bench.ranks.afresh()) for _ in range(2))
        yield (
            {
                FIRST: save_first,
                LATER: lambda: save(many, state),
                ONE: lambda: save(single, one),
            },
            len(state),
        )


def many_arrays(bench: Bench) -> dict[str, Sharded]:
    """Return 10,000 arrays of 4 KiB, or as many as fit what was asked for."""
    count = min(_COUNT, max(1, bench.nbytes // _ARRAY_NBYTES))
    rng = np.random.default_rng(bench.ranks.rank)
    rows = random_bytes(rng, count * _ARRAY_NBYTES).reshape(count, _ARRAY_NBYTES)
    return {f"{number:05d}": Sharded.block(row) for number, row in enumerate(rows)}
