"""What a world asks of a metadata server grows with its ranks, not their square."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mpickpt import PerRank, Replicated, Sharded, load_sharded, save_sharded
from tests.states import block_bounds, on_ranks

ROWS = 130
CALLS = ("open", "stat", "lstat", "listdir", "mkdir", "rename", "unlink")


def state(comm):
    first, last = block_bounds(ROWS, comm.rank, comm.size)
    rows = np.arange(3.0 * (last - first)).reshape(-1, 3)
    return {
        "w": Sharded(rows, (ROWS, 3), (first, 0)),
        "scale": Replicated(np.arange(5.0)),
        "own": PerRank({"seed": np.arange(3)}, on_resize="error"),
        "lr": 0.1,
    }


@pytest.fixture
def calls(monkeypatch):
    """How often each system call was made for each path."""
    counted = Counter()

    def counting(name):
        call = getattr(os, name)

        def count(path, *arguments, **options):
            if isinstance(path, str | os.PathLike):
                counted[name, Path(path).name] += 1
            return call(path, *arguments, **options)

        return count

    for name in CALLS:
        monkeypatch.setattr(os, name, counting(name))
    return counted


def save(size, path, step=1):
    on_ranks(size, lambda comm: save_sharded(state(comm), path, step=step, comm=comm))


def restart(size, path):
    on_ranks(size, lambda comm: load_sharded(path, comm=comm, like=state(comm)))


def opens(calls):
    """Return how often each shard was opened."""
    return {
        name: count
        for (call, name), count in calls.items()
        if call == "open" and name.startswith("rank")
    }


def test_restart_of_64_ranks_opens_each_shard_twice(tmp_path, calls):
    save(64, tmp_path / "c")
    calls.clear()

    restart(64, tmp_path / "c")

    # For its index, and for its bytes.
    assert list(opens(calls).values()) == [2] * 64
    assert calls["open", "manifest.json"] == 1


@pytest.mark.parametrize("sizes", [(4, 6), (4, 2), (2, 16)])
def test_reshard_opens_each_shard_twice_and_the_first_once_more(tmp_path, calls, sizes):
    saved, loaded = sizes
    save(saved, tmp_path / "c")
    calls.clear()

    on_ranks(loaded, lambda comm: load_sharded(tmp_path / "c", comm=comm, reshard=True))

    # What was equal on all ranks comes from the first, which rank 0 reads for all.
    first, *others = sorted(opens(calls).items())
    assert first[1] <= 3
    assert [count for _, count in others] == [2] * (saved - 1)
    assert calls["open", "manifest.json"] == 1


def test_save_creates_each_shard_once(tmp_path, calls):
    save(64, tmp_path / "c")

    # Under the name that it has while it is written.
    assert list(opens(calls).values()) == [1] * 64


def test_calls_grow_with_the_ranks(tmp_path, calls):
    grown = {}
    for size in (16, 64):
        calls.clear()
        save(size, tmp_path / f"{size}")
        saving = calls.total()
        calls.clear()
        restart(size, tmp_path / f"{size}")
        grown[size] = (saving, calls.total())

    for few, many in zip(grown[16], grown[64], strict=True):
        assert many < 4.5 * few
