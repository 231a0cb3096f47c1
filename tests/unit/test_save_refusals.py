"""What a save refuses, alike on every rank: replicas, layouts, calls that differ."""

import errno

import numpy as np
import pytest

from mpickpt import (
    CallMismatchError,
    CheckpointExistsError,
    LayoutError,
    ReplicaMismatchError,
    Replicated,
    SaveOptions,
    Sharded,
    StorageError,
    save_sharded,
)
from tests.small_model import ROWS, SIZE, load, model, save, save_failure
from tests.states import (
    failure_on_ranks,
    image_of,
    on_ranks,
)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "c", model)
    return tmp_path / "c"


def deep_dict(depth):
    tree = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


def diverging(rank, check, n=3):
    x = np.zeros(n)
    if rank == 1:
        x[-1] = 1
    return {"good": Replicated(np.arange(4)), "x/y": Replicated(x, check=check)}


def save_until_refused(directory, check, n, n_saves, size=3):
    """Save time after time; return, for each rank, how often it went well, and why."""

    def save_often(comm):
        for step in range(n_saves):
            try:
                save_sharded(
                    diverging(comm.rank, check, n),
                    directory / str(step),
                    step=step,
                    comm=comm,
                )
            except ReplicaMismatchError as failure:
                return step, str(failure), failure.key, failure.ranks
        return n_saves, "", None, None

    outcomes = on_ranks(size, save_often)
    assert len({repr(outcome) for outcome in outcomes}) == 1, outcomes
    return outcomes[0]


@pytest.mark.parametrize("n", [3, 500_000], ids=["one part", "a part a rank"])
def test_check_rotate_finds_divergence_within_as_many_saves_as_ranks(tmp_path, n):
    n_good, text, key, ranks = save_until_refused(tmp_path, "rotate", n, n_saves=3)

    assert n_good < 3
    assert (key, ranks) == ("x%2Fy", [1])
    assert "x%2Fy" in text
    assert "[1]" in text


@pytest.mark.parametrize("n", [3, 500_000], ids=["one part", "a part a rank"])
def test_check_full_finds_divergence_at_once(tmp_path, n):
    n_good, _, key, ranks = save_until_refused(tmp_path, "full", n, n_saves=1)

    assert (n_good, key, ranks) == (0, "x%2Fy", [1])
    assert list(tmp_path.glob("*/*")) == []


def test_check_off_looks_for_no_divergence(tmp_path):
    n_good, *_ = save_until_refused(tmp_path, "off", 3, n_saves=4)

    assert n_good == 4


def test_check_full_finds_what_diverged_after_good_saves(tmp_path):
    x = [np.zeros(3) for _ in range(3)]

    def save_twice(comm):
        tree = {"x": Replicated(x[comm.rank], check="full")}
        save_sharded(tree, tmp_path / "a", step=1, comm=comm)
        x[comm.rank][0] += comm.rank == 2
        save_sharded(tree, tmp_path / "b", step=2, comm=comm)

    failure = failure_on_ranks(3, save_twice)

    assert isinstance(failure, ReplicaMismatchError)
    assert (failure.key, failure.ranks) == ("x", [2])


@pytest.mark.parametrize(
    "values", [(1, 2, 1), (0.0, -0.0, 0.0), (1, True, 1), ("a", b"a", "a")], ids=repr
)
def test_plain_replicated_values_that_differ_are_refused(tmp_path, values):
    failure = save_failure(
        tmp_path / "c",
        lambda rank: {"a": Replicated({"b": [0, values[rank]]})},
        size=3,
    )

    assert isinstance(failure, ReplicaMismatchError)
    assert (failure.key, failure.ranks) == ("a/b/1", [1])
    assert "a/b/1" in str(failure)


def test_replicated_object_whose_state_differs_is_refused(tmp_path):
    failure = save_failure(
        tmp_path / "c",
        lambda rank: {"rng": Replicated(np.random.default_rng(rank == 1))},
        size=3,
    )

    assert isinstance(failure, ReplicaMismatchError)
    assert failure.key.startswith("rng/state/")
    assert failure.ranks == [1]


def test_plain_replicated_nans_are_equal(tmp_path):
    save(tmp_path / "c", lambda rank: {"x": Replicated(float("nan"))})

    assert image_of(load(tmp_path / "c")) == image_of(
        [{"x": Replicated(float("nan"))}] * SIZE
    )


def placed(start, stop, shape=(ROWS,), dtype=float):
    return Sharded(np.zeros(stop - start, dtype), shape, (start,))


REFUSED_LAYOUTS = {
    "gap": [placed(0, 2), placed(3, 6)],
    "gap at the end": [placed(0, 2), placed(2, 5)],
    "overlap": [placed(0, 4), placed(3, 6)],
    "dtypes": [placed(0, 3), placed(3, 6, dtype=np.float32)],
    "global shapes": [placed(0, 3), placed(3, 6, shape=(7,))],
    "kinds": [placed(0, 6), Replicated(np.zeros(6))],
    "array and plain": [Replicated(np.zeros(1)), Replicated(1)],
    "replicas of other shapes": [Replicated(np.zeros(2)), Replicated(np.zeros(3))],
    "replicas of other dtypes": [
        Replicated(np.zeros(2)),
        Replicated(np.zeros(2, int)),
    ],
    "blocks of other widths": [
        Sharded.block(np.zeros((1, 2))),
        Sharded.block(np.zeros((1, 3))),
    ],
    "block and placed": [Sharded.block(np.zeros(3)), placed(3, 6)],
    "pieces without a dtype": [Sharded.pieces([], global_shape=(0,))] * 2,
    "pieces that leave all out": [Sharded.pieces([], global_shape=(3,), dtype=float)]
    * 2,
}


@pytest.mark.parametrize("name", REFUSED_LAYOUTS)
def test_layout_that_does_not_fit_is_refused_with_key_and_ranks(tmp_path, name):
    failure = save_failure(
        tmp_path / "c", lambda rank: {"m": {"w": REFUSED_LAYOUTS[name][rank]}}
    )

    assert isinstance(failure, LayoutError)
    assert failure.key == "m/w"
    assert "'m/w'" in str(failure)
    assert failure.ranks
    assert set(failure.ranks) <= {0, 1}
    assert not (tmp_path / "c").exists()


def test_rank_may_hold_the_same_box_twice(tmp_path):
    def tree_of(rank):
        pieces = [((3 * rank,), np.arange(3) + 3 * rank) for _ in range(2)]
        return {"x": Sharded.pieces(pieces, global_shape=(6,))}

    save(tmp_path / "c", tree_of)
    loaded = load(tmp_path / "c")
    halves = load(tmp_path / "c", size=3, reshard=True)

    assert image_of(loaded) == image_of([tree_of(rank) for rank in range(SIZE)])
    assert [tree["x"].data.tolist() for tree in halves] == [[0, 1], [2, 3], [4, 5]]


def test_pieces_that_overlap_on_one_rank_are_refused(tmp_path):
    pieces = [((0,), np.zeros(3)), ((2,), np.zeros(2))]

    with pytest.raises(LayoutError, match="'x'"):
        save_sharded(
            {"x": Sharded.pieces(pieces, global_shape=(4,))}, tmp_path / "c", step=1
        )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("step", lambda rank: {"step": rank}),
        ("path", lambda rank: {"name": f"c{rank}"}),
        ("options", lambda rank: {"overwrite": rank == 1}),
        ("options", lambda rank: {"options": SaveOptions(read_back=rank == 1)}),
    ],
)
def test_save_with_other_arguments_than_rank_0_is_refused(tmp_path, name, arguments):
    def save_one(comm):
        own = {"name": "c", "step": 1} | arguments(comm.rank)
        path = tmp_path / own.pop("name")
        save_sharded(model(comm.rank), path, comm=comm, **own)

    failure = failure_on_ranks(SIZE, save_one)

    assert isinstance(failure, CallMismatchError)
    assert name in str(failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, True, None, "1"])
def test_step_that_is_no_step_is_refused(tmp_path, step):
    failure = failure_on_ranks(
        SIZE, lambda comm: save_sharded({}, tmp_path / "c", step=step, comm=comm)
    )

    assert isinstance(failure, TypeError | ValueError)
    assert "step" in str(failure)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"options": {"read_back": True}}, "expected SaveOptions"),
        ({"path": None}, "NoneType"),
        ({"step": "1"}, "step is a str"),
    ],
)
def test_wrong_argument_on_one_rank_is_the_same_error_on_all(tmp_path, wrong, text):
    def save_one(comm):
        given = {"path": tmp_path / "c", "step": 1}
        if comm.rank == 1:
            given |= wrong
        save_sharded(model(comm.rank), given.pop("path"), comm=comm, **given)

    failure = failure_on_ranks(SIZE, save_one)

    assert isinstance(failure, TypeError)
    assert text in str(failure)
    assert failure.rank == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["metadata", "metrics"])
@pytest.mark.parametrize(
    "value", [{1: 1, "1": 2}, {"x": float("nan")}, {"x": {1}}, [1], deep_dict(100_000)]
)
def test_what_is_no_json_is_refused_before_anything_is_written(tmp_path, name, value):
    with pytest.raises(TypeError, match=name):
        save_sharded({}, tmp_path / "c", step=1, **{name: value})

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_nbytes": 0},
        {"block_nbytes": 4097},
        {"block_nbytes": 32 << 20},
        {"block_nbytes": 4096.0},
        {"timeout_s": 0},
        {"timeout_s": "1"},
        {"direct_io": "maybe"},
        {"striping": "8"},
    ],
)
def test_options_that_cannot_be_are_refused_when_they_are_made(wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        SaveOptions(**wrong)


def test_path_too_long_is_a_storage_error(tmp_path):
    failure = save_failure(tmp_path / ("x" * 300), model)

    assert isinstance(failure, StorageError)
    assert failure.errno == errno.ENAMETOOLONG


def test_save_over_a_checkpoint_is_refused_unless_overwrite(saved):
    failure = save_failure(saved, lambda rank: model(rank, fill=3))
    before = image_of(load(saved))
    save(saved, lambda rank: model(rank, fill=3), overwrite=True)

    assert isinstance(failure, CheckpointExistsError)
    assert str(saved) in str(failure)
    assert before == image_of([model(rank) for rank in range(SIZE)])
    assert image_of(load(saved)) == image_of(
        [model(rank, fill=3) for rank in range(SIZE)]
    )
