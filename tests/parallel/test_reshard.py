"""A checkpoint loads on other numbers of ranks and in other boxes, under real MPI."""

import random

import numpy as np
import pytest
from mpi4py import MPI

from mpickpt import (
    CorruptShardError,
    PerRank,
    Replicated,
    Sharded,
    WorldSizeMismatchError,
    load_sharded,
    read_manifest,
    save_sharded,
)
from tests.decompositions import decomposition, sharded, slices, wishes
from tests.states import (
    arrays_in,
    block_bounds,
    image_of,
    random_array,
)

SEEDS = range(3)


@pytest.fixture
def part(comm):
    """A communicator of the first half of the ranks; None on the others."""
    n_ranks = (comm.size + 1) // 2
    group = comm.Split(0 if comm.rank < n_ranks else MPI.UNDEFINED, comm.rank)
    yield None if group == MPI.COMM_NULL else group
    if group != MPI.COMM_NULL:
        group.Free()


def boxes_of(seed, arrays, size):
    """Return, for each array and rank, the boxes of a random decomposition."""
    rand = random.Random(seed)
    return {key: decomposition(rand, a.shape, size) for key, a in arrays.items()}


def arrays_of(seed):
    return {
        "vector": random_array("i4", (23,), seed),
        "matrix": random_array("f8", (12, 9), seed),
        "cube": random_array(">f4", (5, 1, 7), seed),
        "point": random_array("f8", (), seed),
        "empty": random_array("f8", (0, 3), seed),
    }


def save_boxes(comm, path, arrays, held):
    """Save arrays in boxes from the ranks of `comm`; others wait for the end."""
    if comm is not None:
        own = {key: sharded(held[key][comm.rank], a) for key, a in arrays.items()}
        save_sharded(own, path, step=1, comm=comm)
    MPI.COMM_WORLD.Barrier()


def load_boxes(comm, path, arrays, wanted):
    """Load boxes on the ranks of `comm`; return what they hold and should hold."""
    like, expected = {}, []
    for key, array in arrays.items():
        boxes = wanted[key][comm.rank]
        pieces = [(offset, np.zeros(extent, array.dtype)) for offset, extent in boxes]
        like[key] = Sharded.pieces(pieces, global_shape=array.shape, dtype=array.dtype)
        expected += [array[slices(*box)] for box in boxes]
    load_sharded(path, comm=comm, like=like, reshard=True)
    return image_of(arrays_in(like)), image_of(expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_world_loads_what_half_of_it_saved(comm, part, shared_tmp_path, seed):
    arrays = arrays_of(seed)
    size = (comm.size + 1) // 2
    save_boxes(part, shared_tmp_path / "c", arrays, boxes_of(seed, arrays, size))

    found, expected = load_boxes(
        comm, shared_tmp_path / "c", arrays, boxes_of(seed + 100, arrays, comm.size)
    )

    assert found == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_half_of_the_world_loads_what_all_saved(comm, part, shared_tmp_path, seed):
    arrays = arrays_of(seed)
    save_boxes(comm, shared_tmp_path / "c", arrays, boxes_of(seed, arrays, comm.size))
    found = expected = None

    if part is not None:
        wanted = boxes_of(seed + 100, arrays, part.size)
        found, expected = load_boxes(part, shared_tmp_path / "c", arrays, wanted)

    assert found == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_load_fills_boxes_that_overlap(comm, shared_tmp_path, seed):
    arrays = arrays_of(seed)
    rand = random.Random(seed)
    save_boxes(comm, shared_tmp_path / "c", arrays, boxes_of(seed, arrays, comm.size))
    wanted = {
        key: [wishes(rand, array.shape) for _ in range(comm.size)]
        for key, array in arrays.items()
    }

    found, expected = load_boxes(comm, shared_tmp_path / "c", arrays, wanted)

    assert found == expected


def test_load_without_like_gives_even_blocks(comm, shared_tmp_path):
    array = random_array("i8", (13, 2), 1)
    if comm.rank == 0:
        pieces = [((0, 0), array[:5]), ((5, 0), array[5:])]
        save_sharded(
            {"x": Sharded.pieces(pieces, global_shape=(13, 2))},
            shared_tmp_path / "c",
            step=1,
        )
    comm.Barrier()
    if comm.size == 1:
        pytest.skip("one rank has no other number of ranks")

    loaded = load_sharded(shared_tmp_path / "c", comm=comm, reshard=True)

    start, stop = block_bounds(13, comm.rank, comm.size)
    expected = {"x": Sharded(array[start:stop], (13, 2), (start, 0))}
    assert image_of(loaded) == image_of(expected)


def test_load_moves_arrays_of_many_parcels(comm, shared_tmp_path):
    arrays = {"big": random_array("f8", (1500, 1100), 2)}
    save_boxes(comm, shared_tmp_path / "c", arrays, boxes_of(5, arrays, comm.size))

    found, expected = load_boxes(
        comm, shared_tmp_path / "c", arrays, boxes_of(6, arrays, comm.size)
    )

    assert found == expected


def bytes_read():
    with open("/proc/self/io") as counters:
        return int(counters.readline().removeprefix("rchar:"))


def test_load_reads_each_byte_once_in_all(comm, shared_tmp_path):
    array = random_array("u1", (24 << 20,), 3)
    start, stop = block_bounds(len(array), comm.rank, comm.size)
    save_sharded(
        {"x": Sharded(array[start:stop], array.shape, (start,))},
        shared_tmp_path / "c",
        step=1,
        comm=comm,
    )
    # Every rank wants everything, which no rank held.
    like = {"x": Sharded(np.zeros_like(array), array.shape, (0,))}
    before = bytes_read()

    load_sharded(shared_tmp_path / "c", comm=comm, like=like, reshard=True)

    n_read = comm.allreduce(bytes_read() - before)
    nbytes = read_manifest(shared_tmp_path / "c").nbytes
    assert np.array_equal(like["x"].data, array)
    assert n_read < 1.01 * nbytes + (100_000 * comm.size)


def columns_of(array, n_columns, rank):
    start, stop = block_bounds(array.shape[1], rank % n_columns, n_columns)
    return Sharded(array[:, start:stop].copy(), array.shape, (0, start))


@pytest.mark.parametrize("grows", [True, False])
def test_tensor_by_data_parallel_boxes_load_on_another_grid(
    comm, shared_tmp_path, grows
):
    many, few = comm.size, max(1, comm.size // 2)
    saved, now = (few, many) if grows else (many, few)
    arrays = {f"layer{i}": random_array("f2", (5, 24), i) for i in range(3)}
    state = {key: columns_of(array, saved, comm.rank) for key, array in arrays.items()}
    like = {
        key: columns_of(np.zeros_like(array), now, comm.rank)
        for key, array in arrays.items()
    }
    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    load_sharded(shared_tmp_path / "c", comm=comm, like=like, reshard=True)

    expected = {key: columns_of(a, now, comm.rank) for key, a in arrays.items()}
    assert image_of(like) == image_of(expected)


@pytest.mark.parametrize("memory", ["C", "F"])
def test_replicas_that_several_ranks_wrote_load_in_place(comm, shared_tmp_path, memory):
    arrays = {
        "w": random_array("f4", (900, 1600), 1),
        "b": random_array("i2", (3, 2), 2),
    }
    n_columns = max(1, comm.size // 2)
    state, like = {}, {}
    for key, array in arrays.items():
        box = columns_of(array, n_columns, comm.rank)
        target = np.zeros(box.data.shape, array.dtype, memory)
        state[key] = {"part": box, "whole": Replicated(array)}
        like[key] = {
            "part": Sharded(target, array.shape, box.offset),
            "whole": Replicated(np.zeros(array.shape, array.dtype, memory)),
        }
    save_sharded(state, shared_tmp_path / "c", step=1, comm=comm)

    load_sharded(shared_tmp_path / "c", comm=comm, like=like)

    assert image_of(like) == image_of(state)


def test_every_kind_of_entry_goes_to_half_of_the_world(comm, part, shared_tmp_path):
    def state(rank, size):
        start, stop = block_bounds(10, rank, size)
        return {
            "x": Sharded(np.arange(start, stop), (10,), (start,)),
            "r": Replicated({"a": np.arange(4), "b": "text"}),
            "first": PerRank(np.full(rank + 1, rank), on_resize="first"),
            "keep": PerRank([rank, "kept"], on_resize="keep"),
            "modulo": PerRank({"seed": rank}, on_resize="modulo"),
            "equal": PerRank(np.arange(3)),
            "lr": 0.5,
        }

    save_sharded(state(comm.rank, comm.size), shared_tmp_path / "c", step=1, comm=comm)
    loaded = expected = None
    if part is not None:
        like = state(part.rank, part.size)
        loaded = load_sharded(shared_tmp_path / "c", comm=part, like=like, reshard=True)
        expected = state(part.rank, part.size)
        if part.size != comm.size:
            expected["first"] = PerRank(np.zeros(1, int), on_resize="first")

    assert image_of(loaded) == image_of(expected)


def failure_of(comm, call):
    """Return type and text of the error that the call raises, alike on all ranks."""
    try:
        call()
    except Exception as error:
        failure = type(error), str(error)
    else:
        failure = None, ""
    failures = comm.allgather(failure[1])
    assert len(set(failures)) == 1, failures
    return failure


def test_other_world_size_is_refused_on_every_rank(comm, shared_tmp_path):
    if comm.rank == 0:
        save_sharded({"x": np.arange(3)}, shared_tmp_path / "c", step=1)
        for shard in shared_tmp_path.glob("c/*.h5"):
            shard.unlink()
    comm.Barrier()
    if comm.size == 1:
        pytest.skip("one rank has no other number of ranks")

    kind, text = failure_of(
        comm, lambda: load_sharded(shared_tmp_path / "c", comm=comm)
    )

    assert kind is WorldSizeMismatchError
    assert "reshard=True" in text


def test_damaged_shard_is_refused_on_every_rank(comm, part, shared_tmp_path):
    if part is not None:
        rows = np.full(1000, part.rank + 7, np.uint8)
        save_sharded(
            {"x": Sharded.block(rows)}, shared_tmp_path / "c", step=1, comm=part
        )
        if part.rank == part.size - 1:
            shard = read_manifest(shared_tmp_path / "c").shards[-1].path
            content = bytearray((shared_tmp_path / "c" / shard).read_bytes())
            content[content.index(bytes(rows))] ^= 1
            (shared_tmp_path / "c" / shard).write_bytes(content)
    comm.Barrier()

    kind, text = failure_of(
        comm, lambda: load_sharded(shared_tmp_path / "c", comm=comm, reshard=True)
    )

    assert kind is CorruptShardError
    assert "rank" in text
