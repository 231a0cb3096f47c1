"""A checkpoint loads from a store by its URL, under real MPI.

The store is a directory behind a scheme of its own, so that every rank sees it and
every byte still comes through `Store`.
"""

from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpickpt import (
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    PerRank,
    Replicated,
    Sharded,
    load_sharded,
    read_manifest,
    save_sharded,
)
from mpickpt.storage import remote_path
from mpickpt.storage.stores import opening
from mpickpt.storage.stores.directory_store import DirectoryStore
from tests.states import block_bounds

SCHEME = "behind://"
ROWS = np.arange(26 * 5, dtype="f4").reshape(26, 5)


@pytest.fixture(autouse=True)
def behind(monkeypatch):
    def open_store(url):
        if url.startswith(SCHEME):
            return DirectoryStore(Path(f"/{url.removeprefix(SCHEME)}"))
        return opening.open_store(url)

    monkeypatch.setattr(remote_path, "open_store", open_store)


def url_of(path):
    return f"{SCHEME}{path.as_posix().lstrip('/')}"


def state_of(comm):
    first, last = block_bounds(len(ROWS), comm.rank, comm.size)
    return {
        "rows": Sharded(ROWS[first:last], global_shape=ROWS.shape, offset=(first, 0)),
        "scale": Replicated(np.arange(3.0)),
        "rng": PerRank(np.random.default_rng(comm.rank), on_resize="modulo"),
        "lr": 0.5,
    }


def like_of(comm):
    state = state_of(comm)
    rows = state["rows"]
    own = np.zeros_like(rows.data)
    return state | {
        "rows": Sharded(own, global_shape=ROWS.shape, offset=rows.offset),
        "scale": Replicated(np.zeros(3)),
    }


@pytest.fixture
def some(comm):
    """Give a communicator of the first so many ranks; None on the others."""
    groups = []

    def first(n_ranks):
        group = comm.Split(0 if comm.rank < n_ranks else MPI.UNDEFINED, comm.rank)
        groups.append(group)
        return None if group == MPI.COMM_NULL else group

    yield first
    for group in groups:
        if group != MPI.COMM_NULL:
            group.Free()


def save(comm, path):
    if comm is not None:
        save_sharded(state_of(comm), path, step=1, comm=comm)
    MPI.COMM_WORLD.Barrier()


def assert_loads(comm, url, **options):
    tree = load_sharded(url, comm=comm, like=like_of(comm), **options)
    first, last = block_bounds(len(ROWS), comm.rank, comm.size)
    assert np.array_equal(tree["rows"].data, ROWS[first:last])
    assert np.array_equal(tree["scale"].data, np.arange(3.0))
    assert tree["lr"] == 0.5


@pytest.mark.parametrize("verify", ["sha256", "crc32", "none"])
def test_world_loads_from_a_store_what_it_saved(comm, shared_tmp_path, verify):
    save(comm, shared_tmp_path / "c")

    assert_loads(comm, url_of(shared_tmp_path / "c"), verify=verify)


@pytest.mark.parametrize(
    ("n_saved", "n_loaded"), [(4, 2), (2, 3), (1, 4), (3, 1), (2, 4)]
)
def test_other_number_of_ranks_loads_from_a_store(
    comm, some, shared_tmp_path, n_saved, n_loaded
):
    if comm.size < max(n_saved, n_loaded):
        pytest.skip("too few ranks")
    save(some(n_saved), shared_tmp_path / "c")
    loading = some(n_loaded)

    if loading is not None:
        assert_loads(loading, url_of(shared_tmp_path / "c"), reshard=True)


def flip(shard):
    content = bytearray(shard.read_bytes())
    content[content.find(ROWS[-1].tobytes()) + 2] ^= 1
    shard.write_bytes(content)


DAMAGE = {
    "flipped": (flip, CorruptShardError, "should have digest"),
    "truncated": (
        lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
        IncompleteCheckpointError,
        "expected are",
    ),
    "missing": (Path.unlink, IncompleteCheckpointError, "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("verify", ["sha256", "crc32"])
def test_damage_in_a_store_is_the_same_error_everywhere(
    comm, shared_tmp_path, kind, verify
):
    path = shared_tmp_path / "c"
    damage, cls, text = DAMAGE[kind]
    save(comm, path)
    shard = read_manifest(path).shards[-1].path
    comm.Barrier()
    if comm.rank == 0:
        damage(path / shard)
    comm.Barrier()

    with pytest.raises(cls, match=text) as caught:
        load_sharded(url_of(path), comm=comm, verify=verify)

    texts = comm.allgather(str(caught.value))
    assert len(set(texts)) == 1
    assert f"{url_of(path)}/{shard}" in texts[0]


def test_absent_url_is_the_same_error_everywhere(comm, shared_tmp_path):
    url = url_of(shared_tmp_path / "absent")

    with pytest.raises(CheckpointNotFoundError, match="nothing is stored there"):
        load_sharded(url, comm=comm)
