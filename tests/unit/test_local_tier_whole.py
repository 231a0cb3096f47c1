"""Saves to the disks of nodes and restores from them, with what else there is."""

import shutil

import pytest

import mpickpt
from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.local_restore import LocalRestorer
from mpickpt.parallel.run_keeper import RunKeeper
from mpickpt.parallel.waiting import run as run_steps
from mpickpt.storage.node_disk import own_directory
from mpickpt.storage.remote_path import RemotePath
from tests.local_tier import Disks, saved
from tests.node_saves import save_on_nodes
from tests.nodes_of_threads import NodesOfThreads
from tests.states import failure_on_ranks, on_ranks
from tests.stores_double import URL, memory_store
from tests.training import Training

SIZE = 4
EVEN = ("a", "a", "b", "b")
FOUR = ("a", "b", "c", "d")


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    return NodesOfThreads(monkeypatch, tmp_path / "disks")


def save(nodes, names, *steps, copies=0):
    def save_each(comm):
        training = Training(comm)
        for step in steps:
            training.train(step)
            save_on_nodes(
                training.state(), nodes.template, step=step, comm=comm, copies=copies
            )

    on_ranks(SIZE, nodes.seat(names, save_each))


def restore(comm, nodes, others=(), set_aside=False):
    training = Training(comm)
    keeper = RunKeeper(own_directory(nodes.template), None)
    restorer = LocalRestorer(
        conversations_of(comm),
        keeper,
        template=nodes.template,
        others=others,
        state=training.state,
        max_attempts=3,
    )
    restored = restorer.newest(None)
    training.adopt(restored)
    training.require_step(restored.step)
    if set_aside:
        keeper.goes_on_from = restored.step
        rejected = restored.rejected
        run_steps(restorer.on_each_node(lambda: keeper.reject(rejected), "reject"))
    return restored


def restored(nodes, names, **options):
    call = nodes.seat(names, lambda comm: restore(comm, nodes, **options))
    return on_ranks(SIZE, call)[0]


@pytest.mark.parametrize("lost", "ab")
def test_lost_node_is_rebuilt_from_the_copies_of_the_other(nodes, lost):
    save(nodes, EVEN, 1, 2, copies=1)
    shutil.rmtree(nodes.run_on(lost).parent)

    found = restored(nodes, EVEN)

    assert found.step == 2
    assert "2 from node" in found.source


def test_ranks_on_new_nodes_are_served_by_the_old_ones(nodes):
    save(nodes, EVEN, 1, copies=1)
    shutil.rmtree(nodes.run_on("b").parent)

    found = restored(nodes, ("c", "d", "a", "c"))

    assert found.source.endswith("from node a")
    assert restored(nodes, ("c", "d", "a", "c")).source.startswith("4 shards from the")


def test_manifest_tells_what_was_brought(nodes):
    save(nodes, FOUR, 1)
    restored(nodes, ("b", "c", "d", "a"))

    manifest = mpickpt.read_manifest(mpickpt.step_path(nodes.run_on("b"), 1))

    tier = manifest.extra["tier"]
    assert tier["node"] == "b"
    assert tier["nodes"] == {"b": [0], "c": [1], "d": [2], "a": [3]}
    assert tier["copies"] == {"b": [1], "c": [2], "d": [3], "a": [0]}


def test_saves_go_on_after_a_restore_elsewhere(nodes):
    save(nodes, EVEN, 1, copies=1)
    shutil.rmtree(nodes.run_on("a").parent)
    restored(nodes, ("b", "c", "c", "b"))

    save(nodes, ("b", "c", "c", "b"), 2, copies=1)
    shutil.rmtree(nodes.run_on("b").parent)

    assert restored(nodes, ("c", "c", "d", "d")).step == 2


def test_later_steps_are_set_aside_on_all_nodes(nodes):
    save(nodes, EVEN, 1, 2)
    directory = mpickpt.step_path(nodes.run_on("b"), 2)
    next(directory.glob("rank*")).unlink()

    found = restored(nodes, EVEN, set_aside=True)

    assert (found.step, list(found.rejected)) == (1, [2])
    for name in "ab":
        assert [e.step for e in mpickpt.checkpoints(nodes.run_on(name))] == [1]
        assert len(list(nodes.run_on(name).glob("step-*.rejected-*"))) == 1


def put(store, path):
    for file in path.rglob("*"):
        if file.is_file():
            store.files[f"run/{file.relative_to(path)}"] = file.read_bytes()


def test_empty_machine_is_restored_from_a_store(nodes, tmp_path, monkeypatch):
    store = memory_store(monkeypatch)
    saved(tmp_path / "run", SIZE, 7)
    put(store, tmp_path / "run")

    found = restored(nodes, FOUR, others=[RemotePath(f"{URL}/run")])

    assert found.source == f"4 shards from {URL}/run/step-0000000007"
    assert restored(nodes, FOUR).source == "4 shards from the nodes that read them"


def test_damaged_shard_alone_comes_from_a_store(nodes, tmp_path, monkeypatch):
    store = memory_store(monkeypatch)
    disks = Disks(tmp_path, 1)
    saved(disks.run(0), SIZE, 7)
    put(store, disks.run(0))
    shutil.copytree(disks.run(0), nodes.run_on("a"))
    shard = next(mpickpt.step_path(nodes.run_on("a"), 7).glob("rank00002-*"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    store.asked.clear()

    found = restored(nodes, "aaaa", others=[RemotePath(f"{URL}/run")])

    assert found.source.startswith(
        f"3 shards from the nodes that read them, 1 from {URL}"
    )


def test_store_that_refuses_does_not_hinder_a_whole_local_tier(nodes, monkeypatch):
    store = memory_store(monkeypatch)
    save(nodes, FOUR, 1)
    store.refuse = 110

    found = restored(nodes, FOUR, others=[RemotePath(f"{URL}/run")])

    assert found.step == 1


def test_store_that_refuses_is_an_error_where_it_is_needed(nodes, monkeypatch):
    store = memory_store(monkeypatch)
    save(nodes, FOUR, 1)
    shutil.rmtree(nodes.run_on("b").parent)
    store.refuse = 110

    call = nodes.seat(
        FOUR, lambda comm: restore(comm, nodes, [RemotePath(f"{URL}/run")])
    )

    assert isinstance(failure_on_ranks(SIZE, call), mpickpt.StorageError)
