"""The same state gives the same shards, byte for byte, whenever it is saved."""

import time

import numpy as np
import pytest

from mpickpt import (
    CheckpointError,
    PerRank,
    Replicated,
    Sharded,
    load_sharded,
    save_sharded,
)
from tests.small_model import ROWS, SIZE, block, load, model, save
from tests.states import (
    image_of,
    on_ranks,
    shard_digests,
)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "c", model)
    return tmp_path / "c"


def test_tree_of_another_size_can_be_saved_again(saved, tmp_path):
    def reload_and_save(comm):
        tree = load_sharded(saved, comm=comm, reshard=True)
        save_sharded(tree, tmp_path / "again", step=2, comm=comm)

    on_ranks(3, reload_and_save)
    loaded = load(tmp_path / "again", size=SIZE, reshard=True)

    assert image_of(loaded) == image_of([model(rank) for rank in range(SIZE)])


def test_filled_tree_saves_with_the_same_digests(saved, tmp_path):
    def reload_and_save(comm):
        like = model(comm.rank, fill=7)
        tree = load_sharded(saved, comm=comm, like=like)
        save_sharded(tree, tmp_path / "again", step=2, comm=comm)

    on_ranks(SIZE, reload_and_save)

    assert shard_digests(tmp_path / "again") == shard_digests(saved)


def test_digests_are_the_same_seconds_later(tmp_path):
    state = {"x": np.arange(5), "y": {"z": "text"}}
    save_sharded(state, tmp_path / "a", step=1)

    time.sleep(2.1)  # HDF5's time stamps count in seconds
    save_sharded(state, tmp_path / "b", step=9)

    assert shard_digests(tmp_path / "a") == shard_digests(tmp_path / "b")


def test_digests_do_not_depend_on_earlier_saves(tmp_path):
    def save_others_first(comm):
        for step, name in enumerate(("b", "c", "d")):
            tree = model(comm.rank, fill=step)
            save_sharded(tree, tmp_path / name, step=step, comm=comm)
        save_sharded(model(comm.rank), tmp_path / "e", step=7, comm=comm)

    save(tmp_path / "a", model)
    on_ranks(SIZE, save_others_first)

    assert shard_digests(tmp_path / "e") == shard_digests(tmp_path / "a")
    assert shard_digests(tmp_path / "b") != shard_digests(tmp_path / "a")


def test_digests_do_not_depend_on_memory_order(tmp_path):
    array = np.arange(24.0).reshape(4, 6)
    forms = {
        "c": array,
        "fortran": np.asfortranarray(array),
        "strided": np.repeat(array, 2, axis=1)[:, ::2],
    }

    for name, form in forms.items():
        save_sharded({"x": form}, tmp_path / name, step=1)

    assert len({tuple(shard_digests(tmp_path / name)) for name in forms}) == 1


@pytest.mark.parametrize("size", [SIZE, 3])
def test_ranks_may_list_their_keys_in_another_order(tmp_path, size):
    def tree_of(rank):
        tree = {"a": block(rank), "b": Replicated(np.arange(3)), "c": 1}
        return tree if rank == 0 else dict(reversed(tree.items()))

    save(tmp_path / "c", tree_of)
    loaded = load(tmp_path / "c", size=size, reshard=True)

    expected = {"b": Replicated(np.arange(3)), "c": 1}
    for rank, tree in enumerate(loaded):
        assert image_of(tree) == image_of(expected | {"a": block(rank, size)})


def per_rank(array):
    return {"x": PerRank(array), "n": 0}


CHANGES = {
    "plain values grow": [{"n": list(range(k))} for k in (0, 3, 3000, 1)],
    "plain values change their type": [{"n": k} for k in (1, 1.0, True, "1", None)],
    "dtypes of one size": [
        per_rank(np.arange(6).astype(kind))
        for kind in ("<i8", ">i8", "<f8", "<u8", "M8[ns]", "M8[us]", "m8[us]", "S8")
    ],
    "shapes of one size": [
        per_rank(np.arange(6).reshape(shape)) for shape in ((6,), (2, 3), (3, 2))
    ],
    "arrays grow": [per_rank(np.arange(k)) for k in (3, 0, 4, 100_000, 3)],
    "arrays swap": [
        {"a": PerRank(np.arange(3)), "b": PerRank(np.arange(4))},
        {"b": PerRank(np.arange(4)), "a": PerRank(np.arange(3))},
    ],
    "keys come and go": [{"a": PerRank(np.arange(3))}, {}, {"b": 1}, {"c": [{}]}],
    "kinds": [{"x": wrap(np.arange(4))} for wrap in (Replicated, PerRank, Replicated)],
    "wrappers of plain values": [{"x": wrap(1)} for wrap in (Replicated, PerRank, int)],
    "containers": [{"x": {0: 1}}, {"x": [1]}, {"x": (1,)}],
    "checks": [{"x": Replicated(np.arange(4), c)} for c in ("off", "full", "rotate")],
}


@pytest.mark.parametrize("name", CHANGES)
def test_state_that_changes_between_saves_is_saved_as_it_is(tmp_path, name):
    states = [*CHANGES[name], *CHANGES[name][:2]]

    def save_each(comm):
        for step, state in enumerate(states):
            save_sharded(state, tmp_path / f"{step}", step=step, comm=comm)

    on_ranks(SIZE, save_each)

    for step, state in enumerate(states):
        save(tmp_path / f"fresh{step}", lambda rank, state=state: state)
        fresh = shard_digests(tmp_path / f"fresh{step}")
        assert shard_digests(tmp_path / f"{step}") == fresh
        assert image_of(load(tmp_path / f"{step}")) == image_of([state] * SIZE)


def test_layout_that_changes_on_one_rank_is_saved_as_it_is(tmp_path):
    def tree_of(rank, step):
        bounds = [0, step, ROWS]
        rows = np.arange(bounds[rank], bounds[rank + 1]) * step
        return {"x": Sharded(rows, (ROWS,), (bounds[rank],)), "b": PerRank(rank * step)}

    def save_each(comm):
        for step in (2, 3, 3, 6, 0, 2):
            tree = tree_of(comm.rank, step)
            path = tmp_path / f"{step}"
            save_sharded(tree, path, step=step, comm=comm, overwrite=True)

    on_ranks(SIZE, save_each)

    for step in (2, 3, 6, 0):
        loaded = load(tmp_path / f"{step}")
        assert image_of(loaded) == image_of([tree_of(r, step) for r in range(SIZE)])


def test_save_goes_well_after_one_that_was_refused(tmp_path):
    def save_bad_and_good(comm):
        save_sharded(model(comm.rank), tmp_path / "a", step=1, comm=comm)
        for bad in (
            {"x": {1}},
            {"x": Sharded(np.ones(3), (7,), (3 * comm.rank,))},
            {"x": Replicated(comm.rank)},
        ):
            with pytest.raises(CheckpointError):
                save_sharded(bad, tmp_path / "b", step=2, comm=comm)
        save_sharded(model(comm.rank), tmp_path / "b", step=2, comm=comm)

    on_ranks(SIZE, save_bad_and_good)

    assert shard_digests(tmp_path / "b") == shard_digests(tmp_path / "a")


def test_load_goes_well_after_one_that_was_refused(tmp_path):
    save(tmp_path / "c", model)

    def load_bad_and_good(comm):
        for like in ({"x": {1}}, {"lr": 1}, {"x": Replicated(np.ones(2))}):
            with pytest.raises(CheckpointError):
                load_sharded(tmp_path / "c", comm=comm, like=like)
        return image_of(load_sharded(tmp_path / "c", comm=comm))

    outcomes = on_ranks(SIZE, load_bad_and_good)

    assert outcomes == [image_of(model(rank)) for rank in range(SIZE)]
