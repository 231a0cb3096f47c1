"""Saves to the disks of nodes: what lies where, and what is refused."""

import os
import shutil
from collections import Counter

import numpy as np
import pytest

import mpickpt
from mpickpt import CallMismatchError, CheckpointExistsError, StorageError
from mpickpt.parallel import node_ground, partners
from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.node_save import on_nodes
from mpickpt.parallel.pending import begin_save
from mpickpt.parallel.save_call import SaveCall
from mpickpt.storage import filesystem
from mpickpt.storage.catalog import step_path
from mpickpt.storage.node_disk import own_directory
from mpickpt.storage.run_directory import RunDirectory
from tests.forged_nodes import two_nodes, why_not
from tests.node_saves import (
    EVEN,
    FOUR,
    ROWS,
    UNEVEN,
    anything_in,
    begin,
    files_on,
    ranks_in,
    require_whole_without,
    save,
    save_on_nodes,
    state,
)
from tests.nodes_of_threads import NodesOfThreads
from tests.ranks_as_threads import Comm
from tests.states import failure_on_ranks, on_ranks, shard_digests


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    return NodesOfThreads(monkeypatch, tmp_path / "disks")


@pytest.mark.parametrize("names", [EVEN, UNEVEN, FOUR, ("a", "b", "a", "b")])
def test_each_shard_lies_on_its_node_only(nodes, names):
    results = on_ranks(4, nodes.seat(names, lambda comm: save(comm, nodes)))

    found = files_on(nodes, set(names))
    for name in set(names):
        expected = [rank for rank in range(4) if names[rank] == name]
        assert ranks_in(found[name]) == expected
        assert "manifest.json" in found[name]
        assert any("layout" in file for file in found[name]) == (0 in expected)
        tier = mpickpt.read_manifest(step_path(nodes.run_on(name), 1)).extra["tier"]
        assert (tier["kind"], tier["node"]) == ("local", name)
        assert tier["nodes"][name] == expected
        assert not any(tier["copies"].values())
    for result, name in zip(results, names, strict=True):
        assert result.path == step_path(nodes.run_on(name), 1)


@pytest.mark.parametrize("how", ["at once", "poll", "thread"])
@pytest.mark.parametrize("names", [EVEN, UNEVEN, FOUR])
def test_any_node_may_be_lost_where_copies_are_kept(nodes, names, how):
    def save_somehow(comm):
        if how == "at once":
            return save(comm, nodes, copies=1)
        return begin(comm, nodes.template, copies=1, progress=how).result()

    on_ranks(4, nodes.seat(names, save_somehow))

    for lost in set(names):
        require_whole_without(nodes, {lost}, set(names))
    for name in set(names):
        directory = step_path(nodes.run_on(name), 1)
        tier = mpickpt.read_manifest(directory).extra["tier"]
        here = sorted(tier["nodes"][name] + tier["copies"][name])
        assert ranks_in(files_on(nodes, [name])[name]) == here
        assert not set(tier["nodes"][name]) & set(tier["copies"][name])


def test_shards_are_those_of_a_save_to_one_directory(nodes, tmp_path):
    def save_both(comm):
        save(comm, nodes, copies=1)
        mpickpt.save_sharded(state(comm), tmp_path / "c", step=1, comm=comm)

    on_ranks(4, nodes.seat(EVEN, save_both))

    local = step_path(nodes.run_on("b"), 1)
    assert shard_digests(local) == shard_digests(tmp_path / "c")


def test_a_node_s_run_directory_counts_as_whole(nodes):
    on_ranks(4, nodes.seat(UNEVEN, lambda comm: save(comm, nodes, copies=0)))

    for name in "ab":
        [entry] = RunDirectory(nodes.run_on(name)).candidates()
        assert entry.is_whole
    shard = next(step_path(nodes.run_on("b"), 1).glob("rank*"))
    shard.write_bytes(b"cut")
    [entry] = RunDirectory(nodes.run_on("b")).candidates()
    assert not entry.is_whole


def test_later_saves_go_on_beside_earlier_ones(nodes):
    def save_thrice(comm):
        for step in (1, 2, 3):
            save(comm, nodes, step, copies=step % 2)

    on_ranks(4, nodes.seat(EVEN, save_thrice))

    for name in "ab":
        steps = [entry.step for entry in mpickpt.checkpoints(nodes.run_on(name))]
        assert steps == [1, 2, 3]
        assert ranks_in(files_on(nodes, [name], 2)[name]) == (
            [0, 1] if name == "a" else [2, 3]
        )


def test_large_shards_go_in_pieces(nodes, monkeypatch):
    monkeypatch.setattr(partners, "PIECE_NBYTES", 4 << 10)

    on_ranks(4, nodes.seat(UNEVEN, lambda comm: save(comm, nodes, copies=1)))

    require_whole_without(nodes, {"a"}, "ab")
    require_whole_without(nodes, {"b"}, "ab")


def test_many_ranks_have_directories_of_their_own(nodes, monkeypatch):
    monkeypatch.setattr("mpickpt.format.naming.RANKS_PER_DIRECTORY", 1)

    on_ranks(4, nodes.seat(EVEN, lambda comm: save(comm, nodes, copies=1)))

    require_whole_without(nodes, {"a"}, "ab")


def test_overwriting_replaces_the_checkpoint_on_all_nodes(nodes):
    def save_twice(comm):
        save(comm, nodes, copies=1)
        return save(comm, nodes, copies=0, overwrite=True)

    [result, *_] = on_ranks(4, nodes.seat(EVEN, save_twice))

    for name, ranks in (("a", [0, 1]), ("b", [2, 3])):
        manifest = mpickpt.read_manifest(step_path(nodes.run_on(name), 1))
        assert manifest.checkpoint_id == result.checkpoint_id
        assert ranks_in(files_on(nodes, [name])[name]) == ranks


def test_step_that_one_node_has_already_is_refused_on_all(nodes):
    def save_again(comm):
        save(comm, nodes)
        if comm.rank == 0:
            shutil.rmtree(nodes.run_on("a"))
        return save(comm, nodes)

    failure = failure_on_ranks(4, nodes.seat(EVEN, save_again))

    assert isinstance(failure, CheckpointExistsError)
    assert failure.rank == 2
    assert anything_in(nodes.run_on("a")) == []
    assert ranks_in(files_on(nodes, ["b"])["b"]) == [2, 3]


def test_copies_on_one_node_are_refused(nodes):
    failure = failure_on_ranks(
        4, nodes.seat("aaaa", lambda comm: save(comm, nodes, copies=1))
    )

    assert isinstance(failure, ValueError)
    assert "copies=1 needs ranks on two nodes or more" in str(failure)
    assert anything_in(nodes.run_on("a")) == []


def test_one_node_saves_without_copies(nodes):
    on_ranks(4, nodes.seat("aaaa", lambda comm: save(comm, nodes)))

    directory = step_path(nodes.run_on("a"), 1)
    loaded = on_ranks(4, lambda comm: mpickpt.load_sharded(directory, comm=comm))
    assert loaded[2]["w"].data[0, 0] == 2.5


def test_one_process_saves_alone(nodes):
    def save_alone(comm):
        tree = {"x": np.arange(3.0)}
        return save_on_nodes(tree, nodes.template, step=4)

    [result] = on_ranks(1, nodes.seat("a", save_alone))

    assert np.array_equal(mpickpt.load_sharded(result.path)["x"], np.arange(3.0))


def test_directory_that_nodes_share_is_refused(nodes, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "mpickpt.parallel.survey.own_view",
        lambda: nodes._own.name.encode().ljust(16),
    )

    failure = failure_on_ranks(
        4,
        nodes.seat(
            EVEN,
            lambda comm: save_on_nodes(
                state(comm), tmp_path / "run", step=1, comm=comm
            ),
        ),
    )

    assert isinstance(failure, StorageError)
    assert "put {node} into its path" in str(failure)
    assert anything_in(tmp_path / "run") == []


def test_variable_that_one_rank_lacks_is_an_error_on_all(nodes, monkeypatch):
    expanded = own_directory

    def own(template):
        if nodes._own.name == "b":
            raise ValueError("the variable DISK is not set")
        return expanded(template)

    monkeypatch.setattr(node_ground, "own_directory", own)

    failure = failure_on_ranks(4, nodes.seat(UNEVEN, lambda comm: save(comm, nodes)))

    assert isinstance(failure, ValueError)
    assert "the variable DISK is not set" in str(failure)
    assert "rank 3" in str(failure)


@pytest.mark.parametrize("what", ["template", "copies"])
def test_ranks_that_ask_for_different_tiers_are_told(nodes, what):
    def save_differently(comm):
        other = comm.rank == 2
        template = nodes.template + "x" * (other and what == "template")
        copies = int(other and what == "copies")
        save_on_nodes(state(comm), template, step=1, comm=comm, copies=copies)

    failure = failure_on_ranks(4, nodes.seat(EVEN, save_differently))

    assert isinstance(failure, CallMismatchError)


def test_rubbish_of_a_crash_is_swept_on_each_node(nodes):
    left = {}
    for name in "ab":
        left[name] = step_path(nodes.run_on(name), 1) / "rank00007-0badcafe.h5.tmp"
        left[name].parent.mkdir(parents=True)
        left[name].write_bytes(b"of a crash")

    on_ranks(4, nodes.seat(EVEN, lambda comm: save(comm, nodes, copies=1)))

    assert not any(path.exists() for path in left.values())


def test_each_node_s_lowest_rank_makes_space_and_asks_before_it_publishes(nodes):
    asked, published = {}, []

    def save_with_less_room(comm):
        call = SaveCall(
            state=lambda: state(comm),
            directory=None,
            step=1,
            metadata=None,
            metrics=None,
            overwrite=False,
            options=mpickpt.SaveOptions(),
            comm=comm,
            make_space=lambda nbytes: asked.update({comm.rank: nbytes}),
            before_publish=lambda: published.append(comm.rank),
        )
        talks = conversations_of(comm)
        call = on_nodes(call, nodes.template, copies=1)
        begin_save(talks, call, progress="poll", on_busy="wait").result()

    on_ranks(4, nodes.seat(UNEVEN, save_with_less_room))

    # For the four shards that each of them gets.
    assert asked.keys() == {0, 3}
    assert all(nbytes > 4 * ROWS * 3 * 4 for nbytes in asked.values())
    assert sorted(published) == [0, 3]


# Real namespaces: hosts with names of their own, and a disk that no other sees.


@pytest.fixture(scope="module")
def forged(tmp_path_factory):
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.mark.parametrize("progress", [None, "poll", "thread"])
def test_one_path_names_another_disk_on_each_node(forged, monkeypatch, progress):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    mounts = filesystem.MOUNTINFO.parent.parent / "thread-self/mountinfo"
    monkeypatch.setattr(filesystem, "MOUNTINFO", mounts)
    run_dir = forged.own / str(progress)

    def save_there(comm):
        if progress is None:
            return save_on_nodes(state(comm), run_dir, step=1, comm=comm, copies=1)
        return begin(comm, run_dir, copies=1, progress=progress).result()

    [first, *_] = on_ranks(4, forged.in_turn(save_there))

    directory = str(step_path(run_dir, 1))
    for number in (0, 1):
        names = forged.run(number, "ls", directory).split()
        assert ranks_in(names) == [0, 1, 2, 3]
        manifest = forged.run(number, "cat", os.path.join(directory, "manifest.json"))
        assert f'"node": "node{number}"' in manifest
        assert first.checkpoint_id in manifest
        sums = forged.run(number, "sh", "-c", f"sha256sum {directory}/rank*.h5")
        assert all(line.split()[0] in manifest for line in sums.splitlines())


class Counted:
    """Counts the collectives and the messages of each rank."""

    def __init__(self, monkeypatch):
        self.collectives, self.messages = Counter(), Counter()
        post, deliver = Comm._post, Comm._deliver

        def counted_post(comm, brought):
            self.collectives[comm.rank] += 1
            return post(comm, brought)

        def counted_deliver(comm, message, dest, tag):
            self.messages[comm.rank] += 1
            return deliver(comm, message, dest, tag)

        monkeypatch.setattr(Comm, "_post", counted_post)
        monkeypatch.setattr(Comm, "_deliver", counted_deliver)

    def of(self, rank):
        return self.collectives[rank], self.messages[rank]


def test_save_without_copies_costs_a_few_small_collectives_more(
    nodes, monkeypatch, tmp_path
):
    # Every heartbeat is a collective: let nobody be busy for so long.
    monkeypatch.setattr("mpickpt.parallel.conversation.LONGEST_BEAT_S", 60.0)
    counted = Counted(monkeypatch)

    def save_there(comm, step):
        save(comm, nodes, step)

    def save_to_one_directory(comm, step):
        path = step_path(tmp_path / "shared", step)
        mpickpt.save_sharded(state(comm), path, step=step, comm=comm)

    def cost(comm):
        costs = []
        for save_step in (save_there, save_to_one_directory):
            for step in (1, 2):
                save_step(comm, step)
            before = counted.of(comm.rank)
            save_step(comm, 3)
            after = counted.of(comm.rank)
            costs.append([y - x for x, y in zip(before, after, strict=True)])
        return costs

    costs = on_ranks(4, nodes.seat(EVEN, cost))

    # Who is where, rooms are made, rooms are told, all are ready, all have published;
    # and a manifest that is longer than an answer of rank 0.
    assert [there[0] - shared[0] for there, shared in costs] == [6] * 4
    # Each leader tells each other rank on its node.
    assert [there[1] - shared[1] for there, shared in costs] == [1, 0, 1, 0]
