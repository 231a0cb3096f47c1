"""What becomes of each rank's own values when the number of ranks changes."""

import numpy as np
import pytest

from mpickpt import (
    PerRank,
    Replicated,
    Sharded,
    WorldSizeMismatchError,
    load_sharded,
)
from tests.small_model import ROWS, SIZE, load, load_failure, save
from tests.states import emptied, image_of, on_ranks

OWN = {
    "plain": lambda rank: rank,
    "array": lambda rank: np.arange(rank, rank + 2),
    "array that grows": lambda rank: np.arange(rank + 1.0),
    "tree": lambda rank: {"a": np.full(2, rank), "b": [rank, {"c": str(rank)}]},
    "tree of other forms": lambda rank: {"a": list(range(rank + 1)), "b": {rank: None}},
}


def save_own(path, value_of, rule="error", size=SIZE):
    save(path, lambda rank: {"x": PerRank(value_of(rank), on_resize=rule)}, size)


@pytest.mark.parametrize("with_like", [False, True])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("size", [1, 3])
def test_on_resize_error_refuses_values_that_differ(tmp_path, name, size, with_like):
    value_of = OWN[name]
    save_own(tmp_path / "c", value_of)

    failure = load_failure(
        tmp_path / "c",
        (lambda rank: {"x": PerRank(value_of(0))}) if with_like else None,
        size=size,
        reshard=True,
    )

    assert isinstance(failure, WorldSizeMismatchError)
    assert "'x" in str(failure)
    assert all(key.split("/")[0] == "x" for key in failure.keys)


@pytest.mark.parametrize("with_like", [False, True])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("size", [1, 3])
def test_on_resize_error_gives_equal_values_to_all(tmp_path, name, size, with_like):
    value = OWN[name](1)
    save_own(tmp_path / "c", lambda rank: value)

    loaded = load(
        tmp_path / "c",
        (lambda rank: {"x": PerRank(OWN[name](0))}) if with_like else None,
        size=size,
        reshard=True,
    )

    assert image_of(loaded) == image_of([{"x": PerRank(value)}] * size)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("size", [1, 3])
def test_on_resize_keep_leaves_what_the_rank_has(tmp_path, name, size):
    save_own(tmp_path / "c", OWN[name])

    loaded = load(
        tmp_path / "c",
        lambda rank: {"x": PerRank(OWN[name](rank + 5), on_resize="keep")},
        size=size,
        reshard=True,
    )

    expected = [{"x": PerRank(OWN[name](r + 5), on_resize="keep")} for r in range(size)]
    assert image_of(loaded) == image_of(expected)


@pytest.mark.parametrize("with_like", [False, True])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("rule", "source"),
    [("first", lambda rank: 0), ("modulo", lambda rank: rank % SIZE)],
)
def test_on_resize_takes_the_value_of_one_saved_rank(
    tmp_path, name, size, rule, source, with_like
):
    save_own(tmp_path / "c", OWN[name], rule)

    loaded = load(
        tmp_path / "c",
        (lambda rank: {"x": PerRank(OWN[name](0), rule)}) if with_like else None,
        size=size,
        reshard=True,
    )

    expected = [{"x": PerRank(OWN[name](source(r)), rule)} for r in range(size)]
    assert image_of(loaded) == image_of(expected)


@pytest.mark.parametrize("name", OWN)
def test_on_resize_callable_makes_the_value_of_all_saved(tmp_path, name):
    save_own(tmp_path / "c", OWN[name])
    calls = []

    def rule(saved, rank, size):
        calls.append((rank, size, len(saved)))
        return [saved[rank % len(saved)], saved[-1], list(saved)]

    loaded = load(
        tmp_path / "c",
        lambda rank: {"x": PerRank(OWN[name](0), on_resize=rule)},
        size=3,
        reshard=True,
    )

    values = [OWN[name](rank) for rank in range(SIZE)]
    for rank, tree in enumerate(loaded):
        expected = PerRank([values[rank % SIZE], values[-1], values], rule)
        assert image_of(tree["x"]) == image_of(expected)
    assert sorted(calls) == [(rank, 3, SIZE) for rank in range(3)]


def test_on_resize_does_not_count_when_the_size_is_the_same(tmp_path):
    save_own(tmp_path / "c", OWN["tree"])

    loaded = load(
        tmp_path / "c",
        lambda rank: {"x": PerRank(OWN["tree"](9), on_resize="first")},
        reshard=True,
    )

    expected = [{"x": PerRank(OWN["tree"](r), "first")} for r in range(SIZE)]
    assert image_of(loaded) == image_of(expected)


def test_bare_values_that_differ_are_refused_when_ranks_change(tmp_path):
    save(tmp_path / "c", lambda rank: {"a": {"seed": rank}, "same": 1})

    failure = load_failure(tmp_path / "c", size=3, reshard=True)

    assert isinstance(failure, WorldSizeMismatchError)
    assert failure.keys == ["a/seed"]
    assert "a/seed" in str(failure)


@pytest.mark.parametrize("rule", ["first", "modulo", "keep"])
def test_like_says_what_to_do_with_bare_values_that_differ(tmp_path, rule):
    save(tmp_path / "c", lambda rank: {"seed": rank, "same": 1})

    loaded = load(
        tmp_path / "c",
        lambda rank: {"seed": PerRank(rank + 5, on_resize=rule), "same": 0},
        size=3,
        reshard=True,
    )

    expected = {"first": [0, 0, 0], "modulo": [0, 1, 0], "keep": [5, 6, 7]}[rule]
    assert [tree["seed"].data for tree in loaded] == expected
    assert [tree["same"] for tree in loaded] == [1, 1, 1]


@pytest.mark.parametrize("rule", ["keep", "first", "modulo"])
def test_on_resize_counts_for_generators(tmp_path, rule):
    save(
        tmp_path / "c",
        lambda rank: {"rng": PerRank(np.random.default_rng(rank), rule)},
    )

    def load_and_draw(comm):
        rng = np.random.default_rng(comm.rank + 50)
        like = {"rng": PerRank(rng, on_resize=rule)}
        load_sharded(tmp_path / "c", comm=comm, like=like, reshard=True)
        return rng.random()

    draws = on_ranks(3, load_and_draw)

    seeds = {"keep": [50, 51, 52], "first": [0, 0, 0], "modulo": [0, 1, 0]}[rule]
    assert draws == [np.random.default_rng(seed).random() for seed in seeds]


@pytest.mark.parametrize("wrapped", [False, True])
def test_generators_that_differ_are_refused_when_ranks_change(tmp_path, wrapped):
    wrap = PerRank if wrapped else (lambda generator: generator)
    save(
        tmp_path / "c",
        lambda rank: {"rng": wrap(np.random.Generator(np.random.MT19937(rank)))},
    )

    failure = load_failure(
        tmp_path / "c",
        lambda rank: {"rng": wrap(np.random.Generator(np.random.MT19937(9)))},
        size=3,
        reshard=True,
    )

    assert isinstance(failure, WorldSizeMismatchError)
    assert "rng" in str(failure)


def test_each_rank_has_its_own_values_again_when_only_boxes_move(tmp_path):
    def tree_of(rank, cut):
        start, stop = [(0, cut), (cut, ROWS)][rank]
        return {
            "x": Sharded(np.arange(start, stop), (ROWS,), (start,)),
            "seed": rank,
            "log": [{"rank": rank}] * (rank + 1),
            "chain": PerRank(np.arange(rank + 2.0)),
            f"only{rank}": Replicated(np.full(2, rank)),
        }

    def load_one(comm):
        rng = np.random.default_rng(99)
        like = emptied(tree_of(comm.rank, 2)) | {"rng": rng}
        loaded = load_sharded(tmp_path / "c", comm=comm, like=like, reshard=True)
        return image_of({k: v for k, v in loaded.items() if k != "rng"}), rng.random()

    save(
        tmp_path / "c",
        lambda rank: tree_of(rank, 4) | {"rng": np.random.default_rng(rank)},
    )

    loaded = on_ranks(SIZE, load_one)

    expected = [
        (image_of(tree_of(rank, 2)), np.random.default_rng(rank).random())
        for rank in range(SIZE)
    ]
    assert loaded == expected
