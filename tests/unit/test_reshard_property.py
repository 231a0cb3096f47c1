"""Any decomposition of an array loads in any other, element for element."""

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpickpt import PerRank, Replicated, Sharded, load_sharded, save_sharded
from tests.decompositions import decomposition, sharded, slices, wishes
from tests.states import (
    arrays_in,
    block_bounds,
    image_of,
    on_ranks,
    random_array,
)

few_examples = settings(
    deadline=None,
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(1, 3)),
)
dtypes = st.sampled_from(["?", "<i2", ">f4", "f8", "S3", "g", "M8[ns]"])
sizes = st.integers(1, 4)


def save_decomposed(path, array, held):
    """Save an array from as many ranks as `held` has lists of boxes."""

    def save(comm):
        tree = {"x": sharded(held[comm.rank], array)}
        save_sharded(tree, path, step=1, comm=comm)

    on_ranks(len(held), save)


def targets_of(boxes, array):
    """Return a template with arrays of other content for these boxes."""
    pieces = [(offset, np.zeros(extent, array.dtype)) for offset, extent in boxes]
    return Sharded.pieces(pieces, global_shape=array.shape, dtype=array.dtype)


def load_wanted(path, array, wanted):
    """Load boxes on as many ranks as there are lists of them; return each rank's."""

    def load(comm):
        like = {"x": targets_of(wanted[comm.rank], array)}
        load_sharded(path, comm=comm, like=like, reshard=True)
        return arrays_in(like)

    return on_ranks(len(wanted), load)


def assert_filled(filled, wanted, array):
    expected = [[array[slices(*box)] for box in boxes] for boxes in wanted]
    assert image_of(filled) == image_of(expected)


@few_examples
@given(st.randoms(use_true_random=False), shapes, dtypes, sizes, sizes)
def test_load_fills_any_boxes_from_any_decomposition(rand, shape, dtype, saved, now):
    array = random_array(dtype, shape, 1)
    held = decomposition(rand, shape, saved)
    wanted = [wishes(rand, shape) for _ in range(now)]

    with tempfile.TemporaryDirectory() as path:
        save_decomposed(Path(path) / "c", array, held)
        filled = load_wanted(Path(path) / "c", array, wanted)

    assert_filled(filled, wanted, array)


@few_examples
@given(st.randoms(use_true_random=False), shapes, dtypes, sizes, sizes)
def test_load_moves_any_decomposition_to_any_other(rand, shape, dtype, saved, now):
    array = random_array(dtype, shape, 2)
    held, wanted = (decomposition(rand, shape, size) for size in (saved, now))

    with tempfile.TemporaryDirectory() as path:
        save_decomposed(Path(path) / "c", array, held)
        filled = load_wanted(Path(path) / "c", array, wanted)

    assert_filled(filled, wanted, array)


@settings(few_examples, max_examples=15)
@given(st.randoms(use_true_random=False), shapes, sizes, sizes)
def test_load_without_like_gives_even_blocks_when_ranks_change(rand, shape, saved, now):
    now += now >= saved
    array = random_array("i8", shape, 3)

    with tempfile.TemporaryDirectory() as path:
        save_decomposed(Path(path) / "c", array, decomposition(rand, shape, saved))
        loaded = on_ranks(
            now, lambda comm: load_sharded(Path(path) / "c", comm=comm, reshard=True)
        )

    for rank, tree in enumerate(loaded):
        held = tree["x"]
        assert held.global_shape == shape
        if not shape:
            continue
        start, stop = block_bounds(shape[0], rank, now)
        assert image_of(arrays_in(held)) == image_of([array[start:stop]])
        assert held.offset == (start,) + (0,) * (len(shape) - 1)


@settings(few_examples, max_examples=15)
@given(st.randoms(use_true_random=False), shapes, sizes, sizes)
def test_loaded_decomposition_can_be_saved_again(rand, shape, saved, now):
    array = random_array("i8", shape, 4)

    with tempfile.TemporaryDirectory() as path:
        first, second = Path(path) / "a", Path(path) / "b"
        save_decomposed(first, array, decomposition(rand, shape, saved))
        on_ranks(
            now,
            lambda comm: save_sharded(
                load_sharded(first, comm=comm, reshard=True), second, step=2, comm=comm
            ),
        )
        everything = [[((0,) * len(shape), shape)]]
        filled = load_wanted(second, array, everything)

    assert_filled(filled, everything, array)


@pytest.mark.parametrize("n_ranks", [2, 3, 7])
def test_one_rank_loads_what_many_saved(tmp_path, n_ranks):
    array = random_array("f4", (13, 5), 5)
    save_decomposed(
        tmp_path / "c", array, decomposition(random.Random(n_ranks), (13, 5), n_ranks)
    )
    target = np.zeros((13, 5), "f4")

    load_sharded(
        tmp_path / "c", like={"x": Sharded(target, (13, 5), (0, 0))}, reshard=True
    )

    assert target.tobytes() == array.tobytes()


@pytest.mark.parametrize("n_ranks", [2, 3, 7])
def test_many_ranks_load_what_one_saved(tmp_path, n_ranks):
    array = random_array("f4", (13, 5), 6)
    save_sharded({"x": Sharded(array, (13, 5), (0, 0))}, tmp_path / "c", step=1)
    wanted = decomposition(random.Random(n_ranks), (13, 5), n_ranks)

    filled = load_wanted(tmp_path / "c", array, wanted)

    assert_filled(filled, wanted, array)


@pytest.mark.parametrize("seed", range(3))
def test_load_reshards_arrays_larger_than_a_parcel(tmp_path, seed):
    rand = random.Random(seed)
    array = random_array("f8", (600, 1100), seed)
    wanted = [wishes(rand, array.shape) for _ in range(3)]

    save_decomposed(tmp_path / "c", array, decomposition(rand, array.shape, 4))
    filled = load_wanted(tmp_path / "c", array, wanted)

    assert_filled(filled, wanted, array)


def tensor_by_data(array, columns, rank):
    """Return the box of a rank of a grid; ranks of the same columns hold copies."""
    start, stop = block_bounds(array.shape[1], rank % columns, columns)
    return Sharded(array[:, start:stop].copy(), array.shape, (0, start))


@pytest.mark.parametrize(("saved", "now"), [(4, 2), (2, 4)])
def test_tensor_by_data_parallel_boxes_load_on_another_grid(tmp_path, saved, now):
    arrays = {f"layer{i}": random_array("f2", (5, 24), i) for i in range(3)}

    def save(comm):
        tree = {k: tensor_by_data(a, saved, comm.rank) for k, a in arrays.items()}
        save_sharded(tree, tmp_path / "c", step=1, comm=comm)

    def load(comm):
        tree = {k: tensor_by_data(a, now, comm.rank) for k, a in arrays.items()}
        expected = image_of(tree)
        for array in arrays_in(tree):
            array[...] = 0
        load_sharded(tmp_path / "c", comm=comm, like=tree, reshard=True)
        return image_of(tree) == expected

    on_ranks(8, save)

    assert on_ranks(8, load) == [True] * 8


def test_blocks_load_in_blocks_of_other_lengths_when_ranks_double(tmp_path):
    array = random_array("i4", (10, 2), 7)

    def save(comm):
        start = [0, 7][comm.rank]
        tree = {"x": Sharded.block(array[start : start + [7, 3][comm.rank]])}
        save_sharded(tree, tmp_path / "c", step=1, comm=comm)

    def load(comm):
        rows = [1, 0, 4, 5][comm.rank]
        like = {"x": Sharded.block(np.zeros((rows, 2), "i4"))}
        return load_sharded(tmp_path / "c", comm=comm, like=like, reshard=True)["x"]

    on_ranks(2, save)
    loaded = on_ranks(4, load)

    assert np.concatenate([x.data for x in loaded]).tobytes() == array.tobytes()
    assert [x.offset for x in loaded if x.data.size] == [(0, 0), (1, 0), (5, 0)]


@pytest.mark.parametrize("now", [1, 3])
def test_other_kinds_go_beside_resharded_arrays(tmp_path, now):
    array = random_array("i4", (9,), 8)

    def save(comm):
        start, stop = block_bounds(9, comm.rank, 2)
        tree = {
            "x": Sharded(array[start:stop], (9,), (start,)),
            "r": Replicated({"a": np.arange(4), "b": "text"}),
            "p": PerRank(np.full(2, comm.rank), on_resize="first"),
            "lr": 0.5,
        }
        save_sharded(tree, tmp_path / "c", step=1, comm=comm)

    on_ranks(2, save)
    loaded = on_ranks(
        now, lambda comm: load_sharded(tmp_path / "c", comm=comm, reshard=True)
    )

    for tree in loaded:
        rest = {key: tree[key] for key in ("r", "p", "lr")}
        assert image_of(rest) == image_of(
            {
                "r": Replicated({"a": np.arange(4), "b": "text"}),
                "p": PerRank(np.zeros(2, int), on_resize="first"),
                "lr": 0.5,
            }
        )
