"""The copy that a shard is written from."""

import mmap
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import mpickpt
from mpickpt import PerRank, SaveOptions, save_sharded, save_sharded_async
from mpickpt.storage import staging as staging_module
from tests.states import failure_on_ranks, shard_digests

ODD = 100_003  # no multiple of a page, in bytes


@pytest.fixture
def fresh_memory(monkeypatch):
    """As in a process that has not saved yet."""
    memory = {}
    monkeypatch.setattr("mpickpt.parallel.communicators._solo_memory", lambda: memory)


def save(path, tree, **options):
    return save_sharded_async(tree, path, step=1, **options).result()


@pytest.mark.parametrize("direct_io", ["on", "off"])
@pytest.mark.parametrize("block_nbytes", [4096, 64 << 10, 8 << 20])
def test_file_is_the_same_however_it_is_written(tmp_path, direct_io, block_nbytes):
    tree = {"x": np.arange(ODD, dtype=np.uint8), "y": np.arange(ODD / 5)}
    options = SaveOptions(direct_io=direct_io, block_nbytes=block_nbytes)
    save_sharded(tree, tmp_path / "a", step=1)

    save(tmp_path / "b", tree, options=options)

    assert shard_digests(tmp_path / "b") == shard_digests(tmp_path / "a")


def test_read_back_finds_nothing_wrong_with_a_good_write(tmp_path):
    tree = {"x": np.arange(ODD)}

    save(tmp_path / "a", tree, options=SaveOptions(read_back=True))

    loaded = mpickpt.load_sharded(tmp_path / "a")
    np.testing.assert_array_equal(loaded["x"].data, tree["x"])


def test_padding_of_long_doubles_does_not_depend_on_what_lay_there(tmp_path):
    def garbage(value, shape):
        array = np.full(shape, value, dtype=np.longdouble)
        raw = array.view(np.uint8).reshape(-1, array.itemsize)
        raw[:, 10:] = 0xA5
        return array

    save(tmp_path / "a", {"x": garbage(1.5, 7)})
    save(tmp_path / "b", {"x": np.full(7, 1.5, dtype=np.longdouble)})

    assert shard_digests(tmp_path / "a") == shard_digests(tmp_path / "b")


def test_memory_is_kept_from_save_to_save(tmp_path, fresh_memory, monkeypatch):
    made = []
    allocate = staging_module._allocate
    monkeypatch.setattr(
        staging_module, "_allocate", lambda n: made.append(n) or allocate(n)
    )

    for number in range(5):
        save(tmp_path / f"{number}", {"x": np.full(ODD, number)})

    assert len(made) == 1


def test_growing_state_never_takes_two_copies(tmp_path, fresh_memory, monkeypatch):
    allocate, earlier, alive = staging_module._allocate, [], []

    def watched(nbytes):
        alive.extend(reference() is not None for reference in earlier)
        memory = allocate(nbytes)
        earlier.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(staging_module, "_allocate", watched)

    for number in range(1, 4):
        save(tmp_path / f"{number}", {"x": np.zeros(number * 1_000_000)})

    assert len(earlier) == 3
    assert alive == [False] * 3


def test_lack_of_memory_on_one_rank_is_raised_on_all(tmp_path, monkeypatch):
    allocate = staging_module._allocate
    rank_of = threading.local()

    def refused(nbytes):
        if rank_of.rank == 1:
            raise MemoryError(f"no memory for a copy of {nbytes} bytes")
        return allocate(nbytes)

    monkeypatch.setattr(staging_module, "_allocate", refused)

    def save_rank(comm):
        rank_of.rank = comm.rank
        tree = {"x": PerRank(np.zeros(1000))}
        save_sharded_async(tree, tmp_path / "c", step=1, comm=comm).result()

    error = failure_on_ranks(2, save_rank)

    assert "no memory" in str(error)
    assert not (tmp_path / "c").exists()


def test_system_that_refuses_memory_is_a_memory_error():
    with pytest.raises(MemoryError, match="copy"):
        staging_module._allocate(1 << 60)


@pytest.fixture
def memory_disk():
    """A directory where a sync costs nothing, if there is one."""
    shared = Path("/dev/shm")
    directory = tempfile.mkdtemp(dir=shared if shared.is_dir() else None)
    yield Path(directory)
    shutil.rmtree(directory)


def test_memory_does_not_grow_over_200_saves(memory_disk):
    def resident_nbytes():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE

    tree = {"x": np.zeros(1 << 17), "many": [np.zeros(9) for _ in range(50)]}
    run = memory_disk / "run"
    with mpickpt.CheckpointManager(run, state=lambda: tree, keep=2) as manager:
        for step in range(50):
            manager.save(step)
        manager.wait()
        before = resident_nbytes()
        for step in range(50, 250):
            tree["x"][...] = step
            manager.save(step)
        manager.wait()
        after = resident_nbytes()

    # Python and the C library take memory 1 MiB at a time; a copy has as much.
    assert after - before < 4 << 20
