"""Restores from the disks of nodes under a real MPI; every rank is on a node."""

import numpy as np
import pytest

import mpickpt
from mpickpt import Sharded, save_sharded, step_path
from mpickpt.bench.counters import forget_peak, peak_nbytes, resident_nbytes
from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.local_restore import LocalRestorer
from mpickpt.parallel.run_keeper import RunKeeper
from tests.local_tier import Disks, restore
from tests.training import Training

STEP = 7
MIB = 1 << 20


@pytest.fixture
def disks(comm, shared_tmp_path):
    return Disks(shared_tmp_path, comm.size)


@pytest.fixture
def shared(comm, shared_tmp_path):
    """A run with one checkpoint, in one directory."""
    run = shared_tmp_path / "shared"
    save(comm, run)
    return run


def save(comm, run, rows=12):
    training = Training(comm, rows)
    training.train(STEP)
    save_sharded(training.state(), step_path(run, STEP), step=STEP, comm=comm)


def on_root(comm, call):
    if comm.rank == 0:
        call()
    comm.Barrier()


def spread(comm, disks, shared, *, copies=True, wiped=None):
    def place():
        homes = list(range(comm.size))
        disks.spread(
            step_path(shared, STEP),
            homes=homes,
            copies=[(n + 1) % comm.size for n in homes] if copies else None,
        )
        if wiped is not None:
            disks.wipe(wiped)

    on_root(comm, place)


def test_shards_are_read_at_home(comm, disks, shared):
    spread(comm, disks, shared)

    found = restore(comm, disks, range(comm.size))

    assert found.source.endswith("from the nodes that read them")


@pytest.mark.parametrize("rows", [12, 300_000])
def test_ranks_placed_elsewhere_find_their_shards(comm, disks, shared_tmp_path, rows):
    run = shared_tmp_path / "shared"
    save(comm, run, rows)
    spread(comm, disks, run, copies=False)
    places = [(rank + 1) % comm.size for rank in range(comm.size)]

    found = restore(comm, disks, places, rows=rows)

    assert found.step == STEP
    assert ("from node" in found.source) == (comm.size > 1)


def test_lost_node_is_made_up_for_by_copies(comm, disks, shared):
    if comm.size == 1:
        pytest.skip("one node has no partner")
    spread(comm, disks, shared, wiped=1)

    found = restore(comm, disks, range(comm.size))

    assert "1 from node" in found.source


def test_lost_node_without_copies_comes_from_the_next_tier(comm, disks, shared):
    spread(comm, disks, shared, copies=False, wiped=comm.size - 1)

    found = restore(comm, disks, range(comm.size), others=[shared])

    assert str(step_path(shared, STEP)) in found.source


def test_damaged_shard_is_repaired_from_the_next_tier(comm, disks, shared):
    spread(comm, disks, shared, copies=False)
    path = disks.shard(comm.size - 1, STEP, comm.size - 1)
    good = path.read_bytes()
    comm.Barrier()
    on_root(comm, lambda: path.write_bytes(good[:-1] + bytes([good[-1] ^ 1])))

    found = restore(comm, disks, range(comm.size), others=[shared])

    assert str(step_path(shared, STEP)) in found.source
    comm.Barrier()
    assert path.read_bytes() == good


def test_error_is_the_same_on_all_ranks(comm, disks, shared):
    spread(comm, disks, shared, copies=False, wiped=0)
    on_root(comm, lambda: None)

    def attempt():
        try:
            restore(comm, disks, range(comm.size))
        except mpickpt.CheckpointError as error:
            return type(error).__name__, str(error)
        return None

    found = comm.allgather(attempt())

    assert len(set(found)) == 1
    # One node alone has nothing left, and so nothing to complain of.
    assert (found[0] is None) == (comm.size == 1)


@pytest.mark.parametrize("grows", [True, False])
def test_another_number_of_ranks_loads(comm, disks, shared_tmp_path, grows):
    if comm.size % 2:
        pytest.skip("needs an even number of ranks")
    run, n_half = shared_tmp_path / "shared", comm.size // 2
    half = comm.Split(comm.rank // n_half, comm.rank)
    is_in_half = comm.rank < n_half
    before, after = (half, comm) if grows else (comm, half)
    if is_in_half or not grows:
        save(before, run, rows=24 if grows else 12)
    homes = [rank % n_half for rank in range(before.size)]
    comm.Barrier()
    on_root(comm, lambda: disks.spread(step_path(run, STEP), homes=homes))
    found = None

    if is_in_half or grows:
        found = restore(
            after,
            disks,
            range(after.size),
            rows=12 if grows else 24,
            reshard=True,
            check=False,
        )

    half.Free()
    assert found is None or "from the nodes that read them" in found.source


def test_memory_is_bounded_while_files_move(comm, disks, shared_tmp_path):
    if comm.size != 2:
        pytest.skip("one size is enough")
    rows = np.full(64 * MIB // 8, comm.rank, "f8")
    run = shared_tmp_path / "shared"
    tree = {"w": Sharded.block(rows)}
    save_sharded(tree, step_path(run, STEP), step=STEP, comm=comm)
    spread(comm, disks, run, copies=False)
    keeper = RunKeeper(disks.run(1 - comm.rank), None)
    restorer = LocalRestorer(
        conversations_of(comm),
        keeper,
        template="run",
        state=lambda: tree,
        max_attempts=3,
    )
    if not forget_peak():
        pytest.skip("peaks are not counted anew here")
    before = resident_nbytes()

    restorer.newest(None)

    assert (rows == comm.rank).all()
    assert peak_nbytes() - before < 80 * MIB
