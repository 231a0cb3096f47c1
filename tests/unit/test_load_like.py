"""A load fills `like`, or what stands there for arrays that it allocates."""

import numpy as np
import pytest

from mpickpt import (
    AsSaved,
    LayoutError,
    PerRank,
    Replicated,
    Sharded,
    ShardManifest,
    WorldSizeMismatchError,
    open_checkpoint,
    save_sharded,
)
from tests.small_model import (
    ROWS,
    SIZE,
    block,
    changed,
    load,
    load_failure,
    model,
    save,
)
from tests.states import (
    block_bounds,
    image_of,
)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "c", model)
    return tmp_path / "c"


@pytest.mark.parametrize("reshard", [False, True])
def test_load_returns_the_saved_tree_without_like(saved, reshard):
    loaded = load(saved, reshard=reshard)

    assert image_of(loaded) == image_of([model(rank) for rank in range(SIZE)])


@pytest.mark.parametrize("reshard", [False, True])
def test_load_fills_like(saved, reshard):
    likes = [model(rank, fill=7) for rank in range(SIZE)]

    loaded = load(saved, likes.__getitem__, reshard=reshard)

    assert image_of(loaded) == image_of([model(rank) for rank in range(SIZE)])
    for tree, like in zip(loaded, likes, strict=True):
        assert tree["model"]["w"].data is like["model"]["w"].data
        assert tree["model"]["norm"].data["bias"] is like["model"]["norm"].data["bias"]
        assert tree["own"].data is like["own"].data


def test_load_calls_like_with_the_manifest(saved):
    seen = []

    def like(manifest):
        seen.append((type(manifest), manifest.step))
        return changed(model(len(seen) % SIZE), model=AsSaved, own=AsSaved)

    loaded = load(saved, lambda rank: like)

    assert image_of(loaded) == image_of([model(rank) for rank in range(SIZE)])
    assert seen == [(ShardManifest, 1)] * SIZE


def test_load_raises_the_error_of_a_like_that_fails_on_one_rank(saved):
    def like_of(rank):
        return lambda manifest: {}["absent"] if rank == 1 else model(rank)

    failure = load_failure(saved, like_of)

    assert isinstance(failure, KeyError)


@pytest.mark.parametrize("size", [1, SIZE, 3])
def test_cast_converts_to_the_dtypes_of_like(saved, size):
    def like_of(rank):
        tree = model(rank, size, fill=7)
        tree["model"]["w"] = block(rank, size, fill=7, dtype=np.float32)
        tree["model"]["norm"].data["scale"] = np.zeros(3, ">i2")
        tree["own"] = PerRank(np.zeros(2, np.complex64), on_resize="first")
        return tree

    loaded = load(saved, like_of, size=size, reshard=True, cast=True)

    for rank, tree in enumerate(loaded):
        assert image_of(tree["model"]["w"]) == image_of(
            block(rank, size, dtype=np.float32)
        )
        scale = tree["model"]["norm"].data["scale"]
        assert image_of(scale) == image_of(np.arange(3, dtype=">i2"))
        assert image_of(tree["own"].data) == image_of(np.array([10, 11], "c8"))


@pytest.mark.parametrize("size", [1, SIZE, 3])
def test_kinds_of_global_arrays_change_into_each_other(saved, size):
    def like_of(rank):
        start, stop = block_bounds(3, rank, size)
        scale = Sharded(np.zeros(stop - start, int), (3,), (start,))
        bias = Sharded.block(np.zeros([2, 0, 0][rank], int))
        norm = {"scale": scale, "bias": bias}
        return {"model": {"w": Replicated(np.zeros(ROWS)), "norm": norm}}

    loaded = load(saved, like_of, size=size, reshard=True, unexpected="ignore")

    for rank, tree in enumerate(loaded):
        start, stop = block_bounds(3, rank, size)
        assert image_of(tree["model"]["w"]) == image_of(Replicated(np.arange(6.0)))
        scale = Sharded(np.arange(start, stop), (3,), (start,))
        assert image_of(tree["model"]["norm"]["scale"]) == image_of(scale)
        assert tree["model"]["norm"]["bias"].data.tolist() == [[1, 2], [], []][rank]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("wrapper", [None, Replicated, PerRank])
def test_bare_array_of_one_rank_loads_as_what_like_says(tmp_path, size, wrapper):
    save_sharded({"x": np.arange(3)}, tmp_path / "c", step=1)

    loaded = load(
        tmp_path / "c",
        (lambda rank: {"x": wrapper(np.zeros(3, int))}) if wrapper else None,
        size=size,
        reshard=True,
    )

    if wrapper is None and size > 1:
        wrapper = Replicated
    expected = {"x": wrapper(np.arange(3)) if wrapper else np.arange(3)}
    assert image_of(loaded) == image_of([expected] * size)


@pytest.mark.parametrize("size", [SIZE, 3])
@pytest.mark.parametrize("now", [None, Replicated, PerRank])
@pytest.mark.parametrize("before", [None, Replicated, PerRank])
def test_plain_values_may_change_their_wrapper(tmp_path, before, now, size):
    value, other = {"a": [1, "x"]}, {"a": [0, None]}
    save(tmp_path / "c", lambda rank: {"x": before(value) if before else value})

    loaded = load(
        tmp_path / "c",
        lambda rank: {"x": now(other) if now else other},
        size=size,
        reshard=True,
    )

    assert image_of(loaded) == image_of([{"x": now(value) if now else value}] * size)


def test_other_boxes_are_refused_with_their_key_unless_resharded(saved):
    def like_of(rank):
        bounds = [(0, 2), (2, 6)][rank]
        tree = model(rank)
        rows = np.zeros(bounds[1] - bounds[0])
        tree["model"]["w"] = Sharded(rows, (ROWS,), (bounds[0],))
        return tree

    failure = load_failure(saved, like_of)
    loaded = load(saved, like_of, reshard=True)

    assert isinstance(failure, LayoutError)
    assert not isinstance(failure, WorldSizeMismatchError)
    assert failure.key == "model/w"
    assert "reshard=True" in str(failure)
    rows = [tree["model"]["w"].data.tolist() for tree in loaded]
    assert rows == [[0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize("size", [1, SIZE, 3])
@pytest.mark.parametrize("as_saved", [AsSaved, AsSaved()], ids=["class", "instance"])
def test_as_saved_stands_for_any_entry(saved, as_saved, size):
    def like_of(rank):
        return {
            "model": {
                "w": as_saved,
                "norm": Replicated({"scale": as_saved, "bias": np.zeros(2, int)}),
            },
            "own": PerRank(as_saved, on_resize="modulo"),
            "lr": as_saved,
            "names": as_saved,
        }

    loaded = load(saved, like_of, size=size, reshard=True)

    for rank, tree in enumerate(loaded):
        expected = model(rank, size)
        expected["own"] = PerRank(expected["own"].data, on_resize="modulo")
        assert image_of(tree) == image_of(expected)


@pytest.mark.parametrize("size", [1, SIZE, 3])
def test_as_saved_stands_for_a_subtree(saved, size):
    def like_of(rank):
        return changed(model(rank, size, fill=7), model=AsSaved)

    loaded = load(saved, like_of, size=size, reshard=True)

    assert image_of(loaded) == image_of([model(rank, size) for rank in range(size)])


def test_spec_asks_for_a_box_that_is_allocated(saved):
    like = {"model": {"w": Sharded.spec((3,), (ROWS,), (2,), "f8")}}

    loaded = load(saved, lambda rank: like, size=3, reshard=True, unexpected="ignore")

    expected = {"model": {"w": Sharded(np.arange(2.0, 5.0), (ROWS,), (2,))}}
    assert image_of(loaded) == image_of([expected] * 3)


def test_spec_of_another_dtype_is_cast_when_asked(saved):
    like = {"model": {"w": Sharded.spec((ROWS,), (ROWS,), (0,), "f2")}}

    failure = load_failure(saved, lambda rank: like, reshard=True, unexpected="ignore")
    loaded = load(
        saved, lambda rank: like, reshard=True, unexpected="ignore", cast=True
    )

    assert failure.key == "model/w"
    expected = {"model": {"w": Sharded(np.arange(6, dtype="f2"), (ROWS,), (0,))}}
    assert image_of(loaded) == image_of([expected] * SIZE)


def test_spec_with_a_box_outside_is_refused(saved):
    like = {"model": {"w": Sharded.spec((3,), (ROWS,), (4,), "f8")}}

    failure = load_failure(saved, lambda rank: like, reshard=True)

    assert isinstance(failure, LayoutError)
    assert failure.key == "model/w"


def test_one_process_reads_what_the_load_gives(saved):
    with open_checkpoint(saved) as checkpoint:
        rows = checkpoint["model", "w"][:]

    assert rows.tolist() == list(range(ROWS))
