"""Saves that go on while the ranks train and talk, under a real MPI."""

import time

import numpy as np
import pytest
from mpi4py import MPI

import mpickpt
from mpickpt import (
    PerRank,
    Replicated,
    Sharded,
    load_sharded,
    save_sharded,
    save_sharded_async,
)
from mpickpt.parallel import pending as pending_module
from tests.states import shard_digests

PROGRESS = ["poll", "thread"]


def tree_of(rank, step=1, rows=500):
    return {
        "w": Sharded.block(np.full((rows, 2), step + rank / 10)),
        "scale": Replicated(np.full(3, step)),
        "own": PerRank(np.arange(rank + 2) + step),
        "step": step,
    }


def require_step(tree, rank, step):
    expected = tree_of(rank, step)
    for name in ("w", "scale", "own"):
        np.testing.assert_array_equal(tree[name].data, expected[name].data)
    assert tree["step"] == step


def pass_around(comm):
    """Exchange messages in a ring, as a training does."""
    received = np.empty(1)
    comm.Sendrecv(
        np.array([float(comm.rank)]),
        dest=(comm.rank + 1) % comm.size,
        recvbuf=received,
        source=(comm.rank - 1) % comm.size,
    )
    assert received[0] == (comm.rank - 1) % comm.size


def fail_writes(monkeypatch, part):
    write = pending_module.write_staged_file

    def failing(path, *arguments):
        if part in str(path):
            raise mpickpt.StorageError("disk full", errno=28, path=str(path))
        return write(path, *arguments)

    monkeypatch.setattr(pending_module, "write_staged_file", failing)


@pytest.mark.parametrize("progress", PROGRESS)
def test_later_changes_do_not_reach_the_disk(comm, shared_tmp_path, progress):
    path = shared_tmp_path / "c"
    tree = tree_of(comm.rank)

    pending = save_sharded_async(tree, path, step=1, comm=comm, progress=progress)
    for name in ("w", "scale", "own"):
        tree[name].data[...] = -7
    pending.result()

    require_step(load_sharded(path, comm=comm), comm.rank, 1)


@pytest.mark.parametrize("progress", PROGRESS)
def test_save_ends_while_the_ranks_talk(comm, shared_tmp_path, progress):
    path = shared_tmp_path / "c"
    pending = save_sharded_async(
        tree_of(comm.rank), path, step=1, comm=comm, progress=progress
    )

    end = time.monotonic() + 60
    while not comm.allreduce(pending.done, MPI.LAND):
        assert time.monotonic() < end
        pass_around(comm)
        pending.poll()

    assert pending.result().step == 1
    require_step(load_sharded(path, comm=comm), comm.rank, 1)


def test_other_saves_and_loads_go_on_meanwhile(comm, shared_tmp_path):
    save_sharded(tree_of(comm.rank, 1), shared_tmp_path / "a", step=1, comm=comm)

    pending = save_sharded_async(
        tree_of(comm.rank, 2), shared_tmp_path / "b", step=2, comm=comm
    )
    require_step(load_sharded(shared_tmp_path / "a", comm=comm), comm.rank, 1)
    save_sharded(tree_of(comm.rank, 3), shared_tmp_path / "c", step=3, comm=comm)
    pending.result()

    for name, step in (("b", 2), ("c", 3)):
        require_step(load_sharded(shared_tmp_path / name, comm=comm), comm.rank, step)


def test_shards_are_those_of_a_blocking_save(comm, shared_tmp_path):
    tree = tree_of(comm.rank)

    save_sharded(tree, shared_tmp_path / "a", step=1, comm=comm)
    save_sharded_async(tree, shared_tmp_path / "b", step=1, comm=comm).result()

    assert shard_digests(shared_tmp_path / "a") == shard_digests(shared_tmp_path / "b")


@pytest.mark.parametrize("progress", PROGRESS)
def test_failure_on_one_rank_is_raised_on_all_by_the_next_save(
    comm, shared_tmp_path, monkeypatch, progress
):
    culprit = comm.size - 1
    fail_writes(monkeypatch, f"b/rank{culprit:05d}")
    options = {"comm": comm, "progress": progress}
    save_sharded_async(
        tree_of(comm.rank, 1), shared_tmp_path / "a", step=1, **options
    ).result()
    save_sharded_async(tree_of(comm.rank, 2), shared_tmp_path / "b", step=2, **options)

    with pytest.raises(mpickpt.StorageError, match="disk full") as raised:
        save_sharded_async(
            tree_of(comm.rank, 3), shared_tmp_path / "c", step=3, **options
        )

    assert comm.size == 1 or raised.value.rank == culprit
    assert len(set(comm.allgather(str(raised.value)))) == 1
    assert not (shared_tmp_path / "b" / "manifest.json").exists()
    require_step(load_sharded(shared_tmp_path / "a", comm=comm), comm.rank, 1)


def test_two_communicators_save_at_the_same_time(comm, shared_tmp_path):
    half = comm.Split(comm.rank % 2, comm.rank)
    path = shared_tmp_path / f"half{comm.rank % 2}"

    both = save_sharded_async(
        tree_of(comm.rank, 1), shared_tmp_path / "all", step=1, comm=comm
    )
    own = save_sharded_async(tree_of(half.rank, 2), path, step=2, comm=half)
    own.result()
    both.result()

    require_step(load_sharded(path, comm=half), half.rank, 2)
    require_step(load_sharded(shared_tmp_path / "all", comm=comm), comm.rank, 1)
    half.Free()
