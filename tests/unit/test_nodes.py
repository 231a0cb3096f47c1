"""A run directory that each node has for itself is refused, alike on every rank."""

import errno
import os
import threading

import numpy as np
import pytest

from mpickpt import (
    CheckpointManager,
    IncompleteCheckpointError,
    Replicated,
    Sharded,
    StorageError,
    load_sharded,
    save_sharded,
    save_sharded_async,
)
from mpickpt.format.naming import mark_name
from mpickpt.parallel import nodes as nodes_module
from mpickpt.parallel.nodes import lookers
from mpickpt.storage import filesystem, second_look
from mpickpt.storage.shared_mark import (
    MarkSearch,
    Witness,
    make_mark,
    own_view,
    remove_mark,
)
from mpickpt.storage.sweep import sweep
from tests.forged_nodes import two_nodes, why_not
from tests.states import failure_on_ranks, on_ranks

SIZE = 4
SAVE_ID = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(second_look, "PATIENCE_S", 0.3)
    # Ranks are threads here, each with mounts of its own.
    mounts = filesystem.MOUNTINFO.parent.parent / "thread-self/mountinfo"
    monkeypatch.setattr(filesystem, "MOUNTINFO", mounts)


@pytest.fixture
def marks(monkeypatch):
    """The marks that were made."""
    made = []

    def make(directory, save_id):
        made.append(directory / mark_name(save_id))
        make_mark(directory, save_id)

    monkeypatch.setattr(nodes_module, "make_mark", make)
    return made


def state(comm):
    rows = np.full((2, 3), comm.rank, "f4")
    return {
        "w": Sharded(rows, (2 * comm.size, 3), (2 * comm.rank, 0)),
        "scale": Replicated(np.arange(5.0)),
    }


def save(comm, path, step=1):
    return save_sharded(state(comm), path, step=step, comm=comm)


def save_async(comm, path):
    return save_sharded_async(state(comm), path, step=1, comm=comm).result()


def save_by_manager(comm, path):
    with CheckpointManager(path.parent, comm, state=lambda: state(comm)) as manager:
        manager.save(1, wait=True)


def listing(nodes, folder):
    """Return the names of all files of a folder, for each node."""
    below = ("-path", f"{folder}/*", "-type", "f", "-not", "-path", "*/.mpickpt/*")
    return [nodes.run(n, "find", str(nodes.own), *below).split() for n in (0, 1)]


@pytest.mark.parametrize("how", [save, save_async, save_by_manager])
def test_save_to_a_disk_of_each_node_is_refused_alike(nodes, how):
    path = nodes.own / how.__name__ / "step-0000000001"

    failure = failure_on_ranks(SIZE, nodes.in_turn(lambda comm: how(comm, path)))

    assert isinstance(failure, StorageError)
    assert (failure.rank, failure.host) == (1, "node1")
    assert failure.path == str(path)
    text = str(failure)
    for number in (0, 1):
        disk = f"tmpfs at {nodes.own}, mounted from disk-of-node{number}"
        assert f"rank {number} on node{number} ({disk})" in text
    assert "has no such directory" in text
    assert "use a directory on a file system that all nodes share" in text
    assert listing(nodes, nodes.own / how.__name__) == [[], []]


def test_save_is_refused_where_both_directories_exist_and_number_alike(nodes):
    path = nodes.own / "both" / "step-0000000001"
    for number in (0, 1):
        nodes.run(number, "mkdir", str(path.parent))
        nodes.run(number, "mount", "-t", "tmpfs", "fresh", str(path.parent))
        nodes.run(number, "mkdir", str(path))
    inodes = {nodes.run(number, "stat", "-c", "%i", str(path)) for number in (0, 1)}

    failure = failure_on_ranks(SIZE, nodes.in_turn(lambda comm: save(comm, path)))

    assert len(inodes) == 1
    assert isinstance(failure, StorageError)
    assert "has another directory of that name" in str(failure)
    assert listing(nodes, path) == [[], []]


def test_save_to_a_disk_of_each_node_is_refused_again(nodes):
    path = nodes.own / "again" / "step-0000000001"

    def save_twice(comm):
        with pytest.raises(StorageError):
            save(comm, path)
        return save(comm, path)

    failure = failure_on_ranks(SIZE, nodes.in_turn(save_twice))

    assert "is not one directory for all nodes" in str(failure)


def test_nodes_that_share_a_directory_look_once(nodes, tmp_path, marks):
    def save_thrice(comm):
        for step in (1, 2):
            save(comm, tmp_path / f"step-{step:010d}", step)
        return save(comm, tmp_path / "other" / "step-0000000003", 3)

    on_ranks(SIZE, nodes.in_turn(save_thrice))

    # Once for each run directory.
    names = ["step-0000000001", "other/step-0000000003"]
    assert [mark.parent for mark in marks] == [tmp_path / name for name in names]
    assert not list(tmp_path.rglob("mark-*"))


def test_ranks_on_one_node_make_no_mark(tmp_path, marks):
    on_ranks(SIZE, lambda comm: save(comm, tmp_path / "c"))

    assert marks == []


def test_directory_that_a_node_may_not_enter_gives_its_own_error(
    nodes, tmp_path, monkeypatch
):
    lstat = os.lstat

    def refuse(path, **options):
        if "mark-" in str(path):
            raise PermissionError(errno.EACCES, "no entry", str(path))
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", refuse)

    failure = failure_on_ranks(
        SIZE, nodes.in_turn(lambda comm: save(comm, tmp_path / "c"))
    )

    assert isinstance(failure, StorageError)
    assert failure.errno == errno.EACCES
    assert failure.host == "node1"
    assert not list(tmp_path.iterdir())


def test_load_says_that_a_node_has_no_such_directory(nodes):
    path = nodes.own / "loaded"
    on_ranks(SIZE, nodes.all_on(0, lambda comm: save(comm, path)))

    failure = failure_on_ranks(
        SIZE, nodes.in_turn(lambda comm: load_sharded(path, comm=comm, reshard=True))
    )

    assert isinstance(failure, IncompleteCheckpointError)
    assert "is missing" in str(failure)
    assert f"{path} is not one directory for all nodes: rank 0 on node0" in str(failure)
    assert "has read its manifest, rank 1 on node1" in str(failure)
    assert "has no such directory" in str(failure)


@pytest.mark.parametrize("other", ["empty", "saved"])
def test_load_says_that_a_node_has_another_directory(nodes, other):
    path = nodes.own / f"loaded-{other}"
    on_ranks(SIZE, nodes.all_on(0, lambda comm: save(comm, path)))
    if other == "saved":
        on_ranks(SIZE, nodes.all_on(1, lambda comm: save(comm, path)))
    else:
        nodes.run(1, "mkdir", str(path))

    failure = failure_on_ranks(
        SIZE, nodes.in_turn(lambda comm: load_sharded(path, comm=comm, reshard=True))
    )

    expected = {"empty": "without a manifest", "saved": "has another checkpoint there"}
    assert expected[other] in str(failure)


def test_missing_shard_on_a_shared_directory_is_told_as_before(nodes, tmp_path):
    on_ranks(SIZE, lambda comm: save(comm, tmp_path / "c"))
    next((tmp_path / "c").glob("rank00003-*")).unlink()

    failure = failure_on_ranks(
        SIZE, nodes.in_turn(lambda comm: load_sharded(tmp_path / "c", comm=comm))
    )

    assert isinstance(failure, IncompleteCheckpointError)
    assert "not one directory" not in str(failure)


def test_lowest_rank_of_each_other_view_looks():
    assert lookers([b"a", b"a", b"a"]) == []
    assert lookers([b"a", b"b", b"b", b"a", b"c", b"b"]) == [1, 4]


def test_view_is_that_of_the_node(nodes):
    views = on_ranks(SIZE, nodes.in_turn(lambda comm: own_view()))

    assert views[0] == views[2] != views[1] == views[3]


def test_mark_that_comes_late_is_found(tmp_path):
    own = Witness(rank=1, host="b", file_system="nfs", reach="nodes")
    search = MarkSearch(tmp_path, SAVE_ID, maker=own, own=own)
    timer = threading.Timer(0.1, make_mark, (tmp_path, SAVE_ID))
    timer.start()

    search.find()

    timer.join()
    assert search.n_looks > 1
    remove_mark(tmp_path, SAVE_ID)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("reaches", "expected"),
    [
        (("nodes", "node"), "mounted on b"),
        (("node", "nodes"), "mounted on a"),
        (("node", "node"), "all nodes share"),
    ],
)
def test_advice_names_the_node_without_the_network_file_system(
    tmp_path, reaches, expected
):
    maker, own = (
        Witness(rank=rank, host=host, file_system="x", reach=reach)
        for rank, host, reach in zip((0, 1), "ab", reaches, strict=True)
    )

    with pytest.raises(StorageError, match=expected):
        MarkSearch(tmp_path, SAVE_ID, maker=maker, own=own).find()


def test_mark_of_a_killed_save_is_swept(tmp_path):
    make_mark(tmp_path, SAVE_ID)

    sweep(tmp_path)

    assert not os.listdir(tmp_path)
