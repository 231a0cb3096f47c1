"""Today's code reads the checkpoint of format version 1, and writes the same bytes."""

import dataclasses

import numpy as np
import pytest

from mpickpt import (
    PerRank,
    Replicated,
    Sharded,
    load_sharded,
    open_checkpoint,
    read_manifest,
)
from mpickpt.storage.shard_image import hdf5_version
from mpickpt.storage.verification import verify_checkpoint
from tests.ranks_as_threads import run_ranks

pytest.importorskip("ml_dtypes", "0.5")

from tests.golden import make_v1, state_v1

SAVED = range(state_v1.SIZE)
needs_x87 = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant != 63 or np.dtype(np.longdouble).itemsize != 16,
    reason="the long double of this machine is not that of the x87",
)


def leaves(value, path=()):
    """Yield (path, leaf) of a state; wrappers and classes are left out.

    Of a container, its type and keys come first, so that empty ones count.
    """
    if isinstance(value, Replicated | PerRank):
        value = value.data
    if isinstance(value, Sharded) and isinstance(value.data, dict):
        parts = value.data.items()
        value = {key: dataclasses.replace(value, data=part) for key, part in parts}
    if isinstance(value, np.random.Generator):
        value = value.bit_generator.state
    if isinstance(value, state_v1.Counter):
        value = value.state_dict()
    if isinstance(value, state_v1.Limits):
        value = vars(value)
    if isinstance(value, state_v1.Point):
        value = value._asdict()
    if not isinstance(value, dict | list | tuple):
        yield path, value
        return
    keys = list(value) if isinstance(value, dict) else range(len(value))
    yield path, (type(value).__name__, list(keys))
    for key in keys:
        yield from leaves(value[key], (*path, key))


def exact(leaf):
    """Return what tells a leaf from all others, nan and -0.0 included."""
    if isinstance(leaf, np.ndarray | np.generic):
        return type(leaf), leaf.dtype, leaf.shape, leaf.tobytes()
    return type(leaf), repr(leaf)


def values(state):
    """Return every leaf of a state that is no `Sharded`, by path."""
    return {
        path: exact(leaf)
        for path, leaf in leaves(state)
        if not isinstance(leaf, Sharded)
    }


def held_boxes(state):
    """Return (offset, array) of the boxes of every `Sharded`, by path."""
    return {
        path: list(leaf.boxes) if leaf.offset is None else [(leaf.offset, leaf.data)]
        for path, leaf in leaves(state)
        if isinstance(leaf, Sharded)
    }


def saved_state(rank):
    """Return what one rank saved; consecutive blocks have their place already."""
    state = state_v1.state(rank)
    sharded = state["sharded"]
    (more,) = sharded["more"]
    sharded["blocks"] = Sharded(sharded["blocks"].data, (7,), (3 * rank,))
    sharded["empty"] = Sharded(sharded["empty"].data, (0, 4), (0, 0))
    sharded["more"] = [Sharded(more.data, (4, 2), (2 * rank, 0))]
    return state


def whole_arrays():
    """Return every sharded array, assembled from what the ranks saved, by path."""
    shapes = {
        path: leaf.global_shape
        for path, leaf in leaves(saved_state(1))
        if isinstance(leaf, Sharded)
    }
    whole = {}
    for rank in SAVED:
        for path, boxes in held_boxes(saved_state(rank)).items():
            for offset, array in boxes:
                into = whole.setdefault(path, np.zeros(shapes[path], array.dtype))
                into[slices(offset, array.shape)] = array
    return whole


def slices(offset, shape):
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def on_ranks(size, load):
    outcomes = run_ranks(size, load)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def assert_is_saved_state(state, rank):
    saved = saved_state(rank)
    assert values(state) == values(saved)
    boxes, expected = held_boxes(state), held_boxes(saved)
    assert [(p, exact(x)) for p, held in boxes.items() for _, x in held] == [
        (p, exact(x)) for p, held in expected.items() for _, x in held
    ]
    assert {p: [o for o, _ in held] for p, held in boxes.items()} == {
        p: [o for o, _ in held] for p, held in expected.items()
    }


def test_as_many_ranks_load_what_they_saved():
    states = on_ranks(2, lambda comm: load_sharded(make_v1.V1, comm=comm))

    for rank in SAVED:
        assert_is_saved_state(states[rank], rank)


def test_load_fills_a_state_in_place():
    def load(comm):
        state = saved_state(comm.rank)
        for wrapped in state["dtypes"].values():
            wrapped.data[...] = np.zeros_like(wrapped.data)
        state["counter"].data.count = 0
        state["generator"].data.standard_normal(5)
        return load_sharded(make_v1.V1, comm=comm, like=state)

    states = on_ranks(2, load)

    for rank in SAVED:
        assert_is_saved_state(states[rank], rank)
        assert isinstance(states[rank]["plain"]["record"], state_v1.Limits)


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_loads_it(size):
    whole = whole_arrays()
    first = saved_state(0)

    states = on_ranks(
        size, lambda comm: load_sharded(make_v1.V1, comm=comm, reshard=True)
    )

    for rank, state in enumerate(states):
        saved = saved_state(rank % 2) | {"generator": first["generator"]}
        assert values(state) == values(saved)
        for path, [(offset, array)] in held_boxes(state).items():
            assert exact(array) == exact(whole[path][slices(offset, array.shape)])
    for path, array in whole.items():
        assert sum(held_boxes(state)[path][0][1].size for state in states) == array.size


def test_one_process_without_mpi_sees_all_of_it():
    whole = whole_arrays()
    by_rank = {
        name: [values(saved_state(rank)[name]) for rank in SAVED]
        for name in ("own", "generator")
    }

    with open_checkpoint(make_v1.V1) as checkpoint:
        state = checkpoint.load()

    assert {name: list(map(values, state.pop(name))) for name in by_rank} == by_rank
    saved = saved_state(0)
    for name in by_rank:
        del saved[name]
    expected = values(saved) | {path: exact(array) for path, array in whole.items()}
    assert values(state) == expected


def test_manifest_says_what_was_given():
    manifest = read_manifest(make_v1.V1)

    assert (manifest.step, manifest.world_size) == (state_v1.STEP, state_v1.SIZE)
    assert manifest.metadata == state_v1.METADATA
    assert manifest.metrics == state_v1.METRICS


@pytest.mark.parametrize("path", make_v1.SAVERS, ids=lambda path: path.name)
@pytest.mark.parametrize("fast", [False, True])
def test_files_are_as_they_were_saved(path, fast):
    assert verify_checkpoint(path, fast=fast).failures == ()


@needs_x87
def test_long_doubles_load():
    state = load_sharded(make_v1.V1_X87)

    for name, saved in make_v1.x87_state().items():
        for one, other in zip(state[name].data, saved.data, strict=True):
            assert one.dtype == other.dtype
            # Not bytes: the padding of the one in memory may hold anything.
            np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(np.signbit(one.real), np.signbit(other.real))


@pytest.mark.parametrize(
    ("path", "save"),
    [
        pytest.param(make_v1.V1, make_v1.save_v1, id="v1"),
        pytest.param(make_v1.V1_X87, make_v1.save_v1_x87, id="v1_x87", marks=needs_x87),
        pytest.param(make_v1.V1_EXAMPLE, make_v1.save_v1_example, id="v1_example"),
    ],
)
def test_the_same_state_gives_the_same_bytes(path, save, tmp_path):
    writer = read_manifest(path).writer["hdf5"]
    if hdf5_version() != writer:
        pytest.skip(f"HDF5 {writer} laid these files out, and here is {hdf5_version()}")

    save(tmp_path / "now")

    for now, golden in zip(files_of(tmp_path / "now"), files_of(path), strict=True):
        assert now.read_bytes() == golden.read_bytes()


def files_of(path):
    manifest = read_manifest(path)
    return [path / record.path for record in (*manifest.shards, manifest.layout)]
