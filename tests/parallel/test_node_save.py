"""Saves to the disks of nodes under a real MPI, where names alone make the nodes."""

import hashlib
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpickpt
from mpickpt import PerRank, Replicated, Sharded
from mpickpt.parallel import partners
from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.node_save import on_nodes
from mpickpt.parallel.pending import begin_save
from mpickpt.parallel.save_call import SaveCall
from mpickpt.storage.catalog import step_path
from tests.node_saves import save_on_nodes
from tests.states import shard_digests

ROWS = 200_000  # several pieces a shard


@pytest.fixture(params=["even", "uneven", "own"])
def template(request, comm, shared_tmp_path, monkeypatch):
    """A run directory for each node: half of the ranks each, all but one, or one."""
    if comm.size < 2:
        pytest.skip("one rank has no partner")
    name = {
        "even": f"n{2 * comm.rank // comm.size}",
        "uneven": f"n{int(comm.rank == comm.size - 1)}",
        "own": f"n{comm.rank}",
    }[request.param]
    monkeypatch.setenv("SLURMD_NODENAME", name)
    return f"{shared_tmp_path}/{{node}}/run"


def tree_of(rank, step=1, rows=ROWS):
    return {
        "w": Sharded.block(np.full((rows + 1000 * rank, 4), step + rank / 10)),
        "scale": Replicated(np.full(3, step)),
        "own": PerRank(np.arange(rank + 2) + step),
        "step": step,
    }


def begin(comm, tree, template, step, progress="poll", copies=1):
    call = SaveCall(
        state=lambda: tree,
        directory=None,
        step=step,
        metadata=None,
        metrics=None,
        overwrite=False,
        options=mpickpt.SaveOptions(),
        comm=comm,
    )
    call = on_nodes(call, template, copies=copies)
    talks = conversations_of(comm)
    return begin_save(talks, call, progress=progress, on_busy="wait")


def require_any_node_may_be_lost(comm, path):
    """Assert on rank 0 that each file lies whole on two nodes."""
    comm.Barrier()
    paths = set(comm.allgather(path))
    if comm.rank == 0:
        manifest = mpickpt.read_manifest(path)
        for record in [*manifest.shards, manifest.layout]:
            copies = [p / record.path for p in paths if (p / record.path).exists()]
            assert len(copies) == 2
            for copy in copies:
                digest = hashlib.sha256(copy.read_bytes()).hexdigest()
                assert digest == record.sha256
        for one in paths:
            assert mpickpt.read_manifest(one).checkpoint_id == manifest.checkpoint_id
            assert not list(one.glob("*.tmp"))
    comm.Barrier()


def test_copies_lie_on_other_nodes(comm, template):
    for step in (1, 2):
        tree = tree_of(comm.rank, step)
        result = save_on_nodes(tree, template, step=step, comm=comm, copies=1)

        require_any_node_may_be_lost(comm, result.path)


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_copies_are_made_while_the_ranks_go_on(comm, template, progress):
    tree = tree_of(comm.rank)
    pending = begin(comm, tree, template, 1, progress)
    tree["w"].data[...] = -7
    end = time.monotonic() + 60
    while not comm.allreduce(pending.poll(), MPI.LAND):
        assert time.monotonic() < end
    result = pending.result()

    require_any_node_may_be_lost(comm, result.path)
    save_on_nodes(tree_of(comm.rank), template, step=2, comm=comm, copies=0)
    assert shard_digests(result.path) == shard_digests(step_path(result.path.parent, 2))


def test_without_copies_a_shard_lies_once(comm, template):
    tree = tree_of(comm.rank)

    result = save_on_nodes(tree, template, step=1, comm=comm)

    paths = set(comm.allgather(result.path))
    manifest = mpickpt.read_manifest(result.path)
    for shard in manifest.shards:
        assert sum((path / shard.path).exists() for path in paths) == 1
    comm.Barrier()


def test_full_disk_amid_the_copies_is_the_same_error_on_all(
    comm, template, monkeypatch
):
    class Full(partners.IncomingFile):
        def take(self, offset, content):
            if offset and comm.rank == comm.size - 1:
                raise mpickpt.StorageError("disk full", errno=28, path=str(self.path))
            super().take(offset, content)

    save_on_nodes(tree_of(comm.rank), template, step=1, comm=comm, copies=1)
    with monkeypatch.context() as patch:
        patch.setattr(partners, "IncomingFile", Full)
        with pytest.raises(mpickpt.StorageError, match="disk full") as raised:
            save_on_nodes(tree_of(comm.rank), template, step=2, comm=comm, copies=1)

    assert raised.value.rank == comm.size - 1
    assert len(set(comm.allgather(str(raised.value)))) == 1
    # Nothing of it is left, and the next one goes well.
    result = save_on_nodes(tree_of(comm.rank), template, step=3, comm=comm, copies=1)
    assert not step_path(result.path.parent, 2).exists()
    require_any_node_may_be_lost(comm, result.path)
