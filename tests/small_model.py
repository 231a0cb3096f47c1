"""A small state with every kind of entry, saved and loaded on ranks as threads."""

import numpy as np

from mpickpt import (
    PerRank,
    Replicated,
    Sharded,
    load_sharded,
    save_sharded,
)
from tests.states import (
    block_bounds,
    failure_on_ranks,
    on_ranks,
)

SIZE = 2
ROWS = 6


def block(rank, size=SIZE, *, fill=None, dtype=float):
    """Return a rank's rows of the array that holds 0, 1, ..., ROWS - 1."""
    start, stop = block_bounds(ROWS, rank, size)
    rows = np.arange(start, stop) if fill is None else np.full(stop - start, fill)
    return Sharded(rows.astype(dtype), (ROWS,), (start,))


def model(rank, size=SIZE, *, fill=None):
    """Return a state with each kind of entry; with `fill`, one of other values."""

    def values(array):
        return array if fill is None else np.full_like(array, fill)

    return {
        "model": {
            "w": block(rank, size, fill=fill),
            "norm": Replicated(
                {"scale": values(np.arange(3)), "bias": values(1 + np.arange(2))}
            ),
        },
        "own": PerRank(values(np.arange(2) + 10), on_resize="first"),
        "lr": 0.5 if fill is None else fill,
        "names": ["a", None] if fill is None else [fill, fill],
    }


def save(path, tree_of, size=SIZE, **options):
    on_ranks(
        size,
        lambda comm: save_sharded(
            tree_of(comm.rank), path, step=1, comm=comm, **options
        ),
    )


def load(path, like_of=None, size=SIZE, **options):
    def load_one(comm):
        like = None if like_of is None else like_of(comm.rank)
        return load_sharded(path, comm=comm, like=like, **options)

    return on_ranks(size, load_one)


def load_failure(path, like_of=None, size=SIZE, **options):
    def load_one(comm):
        like = None if like_of is None else like_of(comm.rank)
        return load_sharded(path, comm=comm, like=like, **options)

    return failure_on_ranks(size, load_one)


def save_failure(path, tree_of, size=SIZE, **options):
    return failure_on_ranks(
        size,
        lambda comm: save_sharded(
            tree_of(comm.rank), path, step=1, comm=comm, **options
        ),
    )


def changed(tree, **entries):
    return tree | entries


def flip_byte(path, content):
    """Flip a bit of the one place in a shard where this content lies."""
    found = [
        (shard, position)
        for shard in sorted(path.glob("rank*.h5"))
        if (position := shard.read_bytes().find(content)) >= 0
    ]
    assert len(found) == 1
    shard, position = found[0]
    with shard.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
