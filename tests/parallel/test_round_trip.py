"""What was saved comes back byte for byte, on every number of ranks."""

import numpy as np
import pytest

from mpickpt import PerRank, Replicated, Sharded, load_sharded, save_sharded
from tests.states import (
    DTYPES,
    arrays_in,
    block_bounds,
    bytes_of,
    emptied,
    image_of,
    random_array,
    shard_digests,
)

ROWS = 11
BIG_NBYTES = 40 << 20


def spelled(dtype):
    return f"{dtype.str} {dtype.name}"


def sharded_of(array, comm):
    start, stop = block_bounds(len(array), comm.rank, comm.size)
    return Sharded(array[start:stop], array.shape, (start,) + (0,) * (array.ndim - 1))


def block_of(array, comm):
    start, stop = block_bounds(len(array), comm.rank, comm.size)
    return Sharded.block(array[start:stop])


def replicated_of(array, comm):
    return Replicated(array)


def per_rank_of(array, comm):
    return PerRank(np.roll(array, comm.rank, 0) if array.ndim else array)


KINDS = {
    "sharded": sharded_of,
    "block": block_of,
    "replicated": replicated_of,
    "per_rank": per_rank_of,
}


def without_offsets(image):
    """Return an image in which a block has no offset: it is agreed at save."""
    return {
        key: one if one[0] != "Sharded" else [array for _, array in one[2]]
        for key, one in image.items()
    }


def every_dtype(kind, comm):
    return {
        spelled(dtype): KINDS[kind](random_array(dtype, (ROWS, 3), seed), comm)
        for seed, dtype in enumerate(DTYPES)
    }


def shape_kinds():
    base = random_array(np.float64, (12, 10, 6), 5)
    frozen = base.copy()
    frozen.flags.writeable = False
    return {
        "zero rows": np.empty((0, 4), np.int32),
        "zero columns": np.empty((12, 0), np.float32),
        "one element": np.array([7], np.int8),
        "strided": base[::2, 1::3, ::-1],
        "transposed": base.T,
        "fortran": np.asfortranarray(base),
        "read-only": frozen,
        "unaligned": np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view("f8"),
        "broadcast": np.broadcast_to(np.arange(6.0), (12, 6)),
        "nine axes": np.arange(2.0**9).reshape((2,) * 9),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_load_gives_back_every_dtype(comm, shared_tmp_path, kind):
    state = every_dtype(kind, comm)
    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    loaded = load_sharded(shared_tmp_path / "c", comm=comm)

    assert without_offsets(image_of(loaded)) == without_offsets(image_of(state))


@pytest.mark.parametrize("kind", KINDS)
def test_load_fills_the_same_arrays_of_every_dtype(comm, shared_tmp_path, kind):
    state = every_dtype(kind, comm)
    like = emptied(state)
    targets = arrays_in(like)
    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    loaded = load_sharded(shared_tmp_path / "c", comm=comm, like=like)

    assert without_offsets(image_of(loaded)) == without_offsets(image_of(state))
    pairs = zip(arrays_in(loaded), targets, strict=True)
    assert all(array is target for array, target in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_load_gives_back_every_kind_of_shape(comm, shared_tmp_path, kind):
    state = {key: KINDS[kind](array, comm) for key, array in shape_kinds().items()}
    like = emptied(state)
    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    loaded = load_sharded(shared_tmp_path / "c", comm=comm)
    filled = load_sharded(shared_tmp_path / "c", comm=comm, like=like)

    assert without_offsets(image_of(loaded)) == without_offsets(image_of(state))
    assert without_offsets(image_of(filled)) == without_offsets(image_of(state))


@pytest.mark.parametrize("make", ["strided", "fortran", "reversed"])
def test_load_fills_arrays_that_are_not_contiguous(comm, shared_tmp_path, make):
    content = random_array(np.int32, (8, 6), 3)
    start, stop = block_bounds(8, comm.rank, comm.size)
    save_sharded(
        {"x": Sharded(content[start:stop], (8, 6), (start, 0))},
        shared_tmp_path / "c",
        step=1,
        comm=comm,
    )
    memory = np.zeros((2 * (stop - start), 12), np.int32)
    target = {
        "strided": memory[::2, ::2],
        "fortran": np.zeros((stop - start, 6), np.int32, "F"),
        "reversed": memory[stop - start - 1 :: -1, 5::-1] if stop > start else memory,
    }[make].reshape(stop - start, -1)[:, :6]

    load_sharded(
        shared_tmp_path / "c",
        comm=comm,
        like={"x": Sharded(target, (8, 6), (start, 0))},
    )

    assert np.array_equal(target, content[start:stop])


def test_load_gives_back_arrays_without_axes(comm, shared_tmp_path):
    state = {
        "sharded": Sharded(np.array(1.5), (), ()),
        "replicated": Replicated(np.array(b"abc")),
        "per_rank": PerRank(np.array(comm.rank)),
        "pieces": Sharded.pieces(
            [((), np.array(True))] if comm.rank == comm.size - 1 else [],
            global_shape=(),
        ),
    }
    like = emptied(state)
    targets = arrays_in(like)
    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    loaded = load_sharded(shared_tmp_path / "c", comm=comm, like=like)
    again = load_sharded(shared_tmp_path / "c", comm=comm)

    assert list(map(bytes_of, targets)) == list(map(bytes_of, arrays_in(state)))
    assert all(
        array is target
        for array, target in zip(arrays_in(loaded), targets, strict=True)
    )
    assert list(map(image_of, arrays_in(again))) == list(
        map(image_of, arrays_in(state))
    )


def test_load_gives_back_arrays_of_many_blocks(comm, shared_tmp_path):
    n = BIG_NBYTES // comm.size + comm.rank
    big = random_array(np.uint8, (n,), comm.rank)
    state = {"big": Sharded.block(big), "small": PerRank(big[:7].copy())}
    like = emptied(state)
    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    load_sharded(shared_tmp_path / "c", comm=comm, like=like)

    assert np.array_equal(like["big"].data, big)
    assert np.array_equal(like["small"].data, big[:7])


def test_load_gives_back_signs_of_zero_and_payloads_of_nan(comm, shared_tmp_path):
    bits = np.array(
        [0x8000000000000000, 0x7FF0000000000001, 0xFFF8DEADBEEF0001, 1], np.uint64
    )
    state = {
        "array": Replicated(bits.view(np.float64)),
        "plain": [bits.view(np.float64)[i].item() for i in (0, 2, 3)],
        "scalar": bits.view(np.float64)[2],
        "complex": complex(-0.0, float("nan")),
    }
    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    loaded = load_sharded(shared_tmp_path / "c", comm=comm)

    assert image_of(loaded) == image_of(state)


@pytest.mark.parametrize("kind", KINDS)
def test_save_modifies_no_array(comm, shared_tmp_path, kind):
    state = every_dtype(kind, comm)
    before = [array.tobytes() for array in arrays_in(state)]

    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    assert [array.tobytes() for array in arrays_in(state)] == before


def test_save_of_the_same_state_gives_the_same_digests(comm, shared_tmp_path):
    for name in ("a", "b", "c"):
        save_sharded(
            every_dtype("block", comm)
            | {"r": Replicated(np.arange(5)), "s": np.longdouble(1) / 3},
            shared_tmp_path / name,
            step=1,
            comm=comm,
        )

    digests = [shard_digests(shared_tmp_path / name) for name in ("a", "b", "c")]

    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_state_can_be_saved_again_with_the_same_digests(
    comm, shared_tmp_path, kind
):
    state = every_dtype(kind, comm) | {"plain": {"lr": 1e-3, "names": ["a", None]}}
    save_sharded(state, shared_tmp_path / "a", step=1, comm=comm)

    loaded = load_sharded(shared_tmp_path / "a", comm=comm)
    save_sharded(loaded, shared_tmp_path / "b", step=2, comm=comm)

    assert shard_digests(shared_tmp_path / "a") == shard_digests(shared_tmp_path / "b")
