"""The ways out of a load: only, rename, missing, unexpected."""

import logging

import numpy as np
import pytest

from mpickpt import (
    CorruptShardError,
    LayoutError,
    PerRank,
    Replicated,
    Sharded,
    load_sharded,
    save_sharded,
)
from tests.small_model import (
    SIZE,
    block,
    changed,
    flip_byte,
    load,
    load_failure,
    model,
    save,
)
from tests.states import (
    image_of,
)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "c", model)
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["model/*"], {"own", "lr", "names"}),
        (["model"], {"own", "lr", "names"}),
        (["model/"], {"own", "lr", "names"}),
        (["*"], set()),
        (["own"], {"model", "lr", "names"}),
        (["lr", "names"], {"model", "own"}),
        (["n*"], {"model", "own", "lr"}),
        (["names", "absent/*"], {"model", "own", "lr"}),
    ],
)
@pytest.mark.parametrize("reshard", [False, True])
def test_only_loads_what_fits_a_pattern(saved, patterns, kept, reshard):
    loaded = load(
        saved, lambda rank: model(rank, fill=7), only=patterns, reshard=reshard
    )

    for rank, tree in enumerate(loaded):
        expected = {k: model(rank, fill=7 if k in kept else None)[k] for k in tree}
        assert image_of(tree) == image_of(expected)


def test_only_may_be_a_single_pattern(saved):
    one = load(saved, only="model/norm/*")

    assert image_of(one) == image_of(load(saved, only=["model/norm/*"]))
    assert list(one[0]) == ["model"]


def test_only_loads_one_entry_of_a_wrapper(saved):
    loaded = load(saved, lambda rank: model(rank, fill=7), only=["model/norm/bias"])

    for rank, tree in enumerate(loaded):
        expected = model(rank, fill=7)
        expected["model"]["norm"].data["bias"] = np.array([1, 2])
        assert image_of(tree) == image_of(expected)


def test_only_returns_the_selected_part_without_like(saved):
    loaded = load(saved, only=["model/norm/scale", "lr"])

    expected = {"model": {"norm": Replicated({"scale": np.arange(3)})}, "lr": 0.5}
    assert image_of(loaded) == image_of([expected] * SIZE)


def test_only_that_fits_nothing_is_refused(saved):
    failure = load_failure(saved, only=["modle/*"])

    assert isinstance(failure, LayoutError)
    assert "modle/*" in str(failure)
    assert "model/w" in str(failure)


def test_only_does_not_read_what_does_not_fit(tmp_path):
    mark = b"a place in the array"
    damaged = np.zeros(20 << 20, np.uint8)
    damaged[10 << 20 :][: len(mark)] = np.frombuffer(mark, np.uint8)
    whole = np.full(20 << 20, 7, np.uint8)
    save_sharded({"a": damaged, "b": whole}, tmp_path / "c", step=1)
    flip_byte(tmp_path / "c", mark)

    loaded = load_sharded(tmp_path / "c", only=["b"])

    assert np.array_equal(loaded["b"], whole)
    with pytest.raises(CorruptShardError):
        load_sharded(tmp_path / "c", only=["a"])


def test_only_verifies_by_crc32_and_says_so(saved, caplog):
    with caplog.at_level(logging.INFO, logger="mpickpt"):
        load(saved, only=["lr"])

    assert "CRC-32" in caplog.text


def test_rename_moves_an_entry(saved):
    loaded = load(saved, rename={"lr": "rate", "own": "model/mine"})

    for tree in loaded:
        assert tree["rate"] == 0.5
        assert tree["model"]["mine"].data.tolist() == [10, 11]
        assert not {"lr", "own"} & set(tree)


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("size", [SIZE, 3])
def test_rename_moves_a_subtree(saved, slash, size):
    def like_of(rank):
        tree = model(rank, size, fill=7)
        return {"net": {"core": tree.pop("model")}} | tree

    loaded = load(
        saved,
        like_of,
        size=size,
        rename={"model" + slash: "net/core" + slash},
        reshard=True,
    )

    for rank, tree in enumerate(loaded):
        expected = model(rank, size)["model"]
        assert image_of(tree["net"]) == image_of({"core": expected})


@pytest.mark.parametrize("reshard", [False, True])
def test_rename_moves_an_entry_inside_a_wrapper(saved, reshard):
    def like_of(rank):
        tree = model(rank, fill=7)
        norm = tree["model"]["norm"].data
        norm["gamma"] = norm.pop("scale")
        return tree

    loaded = load(
        saved, like_of, rename={"model/norm/scale": "model/norm/gamma"}, reshard=reshard
    )

    for tree in loaded:
        assert image_of(tree["model"]["norm"]) == image_of(
            Replicated({"bias": np.array([1, 2]), "gamma": np.arange(3)})
        )


def test_rename_leaves_no_empty_wrapper_behind(tmp_path):
    state = {"norm": Replicated({"scale": np.arange(3)}), "lr": 1}
    save_sharded(state, tmp_path / "c", step=1)
    like = {"gamma": Replicated(np.zeros(3, int)), "lr": 0}

    loaded = load_sharded(tmp_path / "c", like=like, rename={"norm/scale": "gamma"})

    assert image_of(loaded) == image_of({"gamma": Replicated(np.arange(3)), "lr": 1})


def test_rename_swaps_two_entries(tmp_path):
    save_sharded({"a": 1, "b": 2}, tmp_path / "c", step=1)

    loaded = load_sharded(tmp_path / "c", rename={"a": "b", "b": "a"})

    assert loaded == {"a": 2, "b": 1}


def test_rename_joins_a_subtree_with_what_is_there(tmp_path):
    state = {"old": {"b": {"c": 2}}, "model": {"a": 1, "b": {"d": 3}}}
    save_sharded(state, tmp_path / "c", step=1)

    loaded = load_sharded(tmp_path / "c", rename={"old/": "model/"})

    assert loaded == {"model": {"a": 1, "b": {"d": 3, "c": 2}}}


@pytest.mark.parametrize("size", [SIZE, 3])
@pytest.mark.parametrize(
    ("rename", "taken"),
    [
        ({"lr": "own"}, "own"),
        ({"lr": "model"}, "model"),
        ({"own": "model/w"}, "model/w"),
        ({"own": "lr/x"}, "lr"),
        ({"lr": "names/0"}, "names"),
    ],
)
def test_rename_to_a_key_that_was_saved_is_refused(saved, size, rename, taken):
    failure = load_failure(saved, size=size, rename=rename, reshard=True)

    assert isinstance(failure, LayoutError)
    assert failure.key == taken
    assert repr(taken) in str(failure)


def test_rename_goes_before_only(saved):
    loaded = load(saved, rename={"model/": "net/"}, only=["net/w"])

    expected = [{"net": {"w": block(rank)}} for rank in range(SIZE)]
    assert image_of(loaded) == image_of(expected)


@pytest.mark.parametrize("size", [SIZE, 3])
def test_missing_entries_are_refused_with_their_keys(saved, size):
    failure = load_failure(
        saved,
        lambda rank: changed(
            model(rank, size), extra={"a": Replicated(np.ones(2)), "b/c": 1}
        ),
        size=size,
        reshard=True,
    )

    assert isinstance(failure, LayoutError)
    assert failure.key == "extra/a"
    assert "extra/a" in str(failure)
    assert "extra/b%2Fc" in str(failure)


@pytest.mark.parametrize("size", [SIZE, 3])
def test_missing_keep_leaves_entries_as_they_are(saved, size):
    extra = {
        "array": Replicated(np.full(2, 9)),
        "tree": Replicated({"x": np.full(1, 8), "y": "text"}),
        "own": PerRank({"x": np.full(1, 8)}, on_resize="modulo"),
        "sharded": Sharded.block(np.ones(2)),
        "plain": [1, 2],
        "rng": np.random.default_rng(1),
    }

    loaded = load(
        saved,
        lambda rank: changed(model(rank, size, fill=7), extra=extra),
        size=size,
        reshard=True,
        missing="keep",
    )

    for rank, tree in enumerate(loaded):
        found = tree.pop("extra")
        assert found.pop("rng") is extra["rng"]
        assert found["array"].data is extra["array"].data
        assert found["own"].data["x"] is extra["own"].data["x"]
        kept = {key: one for key, one in extra.items() if key != "rng"}
        assert image_of(found) == image_of(kept)
        assert image_of(tree) == image_of(model(rank, size))


@pytest.mark.parametrize("size", [SIZE, 3])
def test_unexpected_entries_are_refused_with_their_keys(saved, size):
    def like_of(rank):
        tree = model(rank, size)
        del tree["lr"]
        del tree["model"]["norm"].data["bias"]
        return tree

    failure = load_failure(saved, like_of, size=size, reshard=True)

    assert isinstance(failure, LayoutError)
    assert failure.key in {"lr", "model/norm/bias"}
    said = " ".join(map(str, [failure, *failure.failures.values()]))
    assert "'lr'" in said
    assert "'model/norm/bias'" in said


@pytest.mark.parametrize("size", [SIZE, 3])
def test_unexpected_ignore_leaves_saved_entries_out(saved, size):
    loaded = load(
        saved,
        lambda rank: {"model": {"w": block(rank, size, fill=7)}},
        size=size,
        reshard=True,
        unexpected="ignore",
    )

    expected = [{"model": {"w": block(rank, size)}} for rank in range(size)]
    assert image_of(loaded) == image_of(expected)


def test_entry_that_one_rank_wants_is_not_unexpected_when_ranks_change(saved):
    def like_of(rank):
        tree = model(rank, 3)
        if rank != 1:
            del tree["model"]["norm"]
        return tree

    loaded = load(saved, like_of, size=3, reshard=True)

    assert ["norm" in tree["model"] for tree in loaded] == [False, True, False]
