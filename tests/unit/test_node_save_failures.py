"""What goes wrong on one node fails a save on all, and leaves nothing on any."""

import errno

import pytest

import mpickpt
from mpickpt import CorruptShardError, StorageError
from mpickpt.parallel import node_ground, partners
from mpickpt.storage import manifest_publishing
from mpickpt.storage.catalog import step_path
from tests.node_saves import (
    EVEN,
    UNEVEN,
    anything_in,
    begin,
    files_on,
    ranks_in,
    require_whole_without,
    save,
)
from tests.nodes_of_threads import NodesOfThreads
from tests.states import failure_on_ranks


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    return NodesOfThreads(monkeypatch, tmp_path / "disks")


def refuse(monkeypatch, owner, name, when, code=errno.ENOSPC):
    """Have a function of a module refuse for the files of one node."""
    call = getattr(owner, name)

    def refusing(*arguments, **options):
        if when(*arguments):
            path = str(arguments[0])
            raise StorageError("cannot: disk full", errno=code, path=path)
        return call(*arguments, **options)

    monkeypatch.setattr(owner, name, refusing)


def require_nothing_saved(nodes, failure, rank):
    assert isinstance(failure, StorageError)
    assert failure.rank == rank
    for name in "ab":
        files = anything_in(nodes.run_on(name))
        assert [path for path in files if "step-0000000001" not in path] == []
        # What was saved before is still there.
        require_first_step(nodes, name)


def require_first_step(nodes, name):
    directory = step_path(nodes.run_on(name), 1)
    assert mpickpt.read_manifest(directory).step == 1
    assert len(ranks_in(files_on(nodes, [name])[name])) == 4


def save_second_badly(nodes, names, how="at once"):
    """Save step 1 well on all ranks, then step 2; return its error."""

    def save_two(comm):
        save(comm, nodes, copies=1)
        if how == "at once":
            save(comm, nodes, 2, copies=1)
        else:
            begin(comm, nodes.template, 2, copies=1, progress=how).result()

    return failure_on_ranks(4, nodes.seat(names, save_two))


def on_node_b(path, *_rest):
    return "/b/" in str(path) and "step-0000000002" in str(path)


def test_node_without_room_fails_the_save_on_all(nodes, monkeypatch):
    refuse(monkeypatch, node_ground, "make_room", on_node_b)

    failure = save_second_badly(nodes, EVEN)

    require_nothing_saved(nodes, failure, 2)


@pytest.mark.parametrize("how", ["at once", "poll", "thread"])
def test_node_that_is_full_when_copies_come_fails_the_save_on_all(
    nodes, monkeypatch, how
):
    refuse(monkeypatch, partners, "IncomingFile", on_node_b)

    failure = save_second_badly(nodes, UNEVEN, how)

    require_nothing_saved(nodes, failure, 3)
    assert failure.errno == errno.ENOSPC


def test_copy_that_is_not_what_was_written_fails_the_save_on_all(nodes, monkeypatch):
    send = partners._Porter._send

    def send_other_bytes(self, number, file, fill, cancelled):
        def fill_wrongly(view, offset):
            fill(view, offset)
            view[0] ^= 1

        wrong = self.rank == 1 and "step-0000000002" in str(self.directory)
        send(self, number, file, fill_wrongly if wrong else fill, cancelled)

    monkeypatch.setattr(partners._Porter, "_send", send_other_bytes)

    failure = save_second_badly(nodes, EVEN)

    assert isinstance(failure, CorruptShardError)
    assert failure.rank == 3
    for name in "ab":
        assert not step_path(nodes.run_on(name), 2).exists()
        require_first_step(nodes, name)


def test_shard_that_cannot_be_read_for_its_copy_fails_the_save_on_all(
    nodes, monkeypatch
):
    refuse(monkeypatch, partners, "open_shard_file", on_node_b, errno.EIO)

    failure = save_second_badly(nodes, EVEN)

    require_nothing_saved(nodes, failure, 2)


@pytest.mark.parametrize("moment", ["stage_checkpoint", "publish_staged_manifest"])
@pytest.mark.parametrize("node", ["a", "b"])
def test_manifest_that_one_node_refuses_is_taken_from_all(
    nodes, monkeypatch, moment, node
):
    def is_of_node(first, *_rest):
        path = str(getattr(first, "directory", first))
        return f"/{node}/" in path and "step-0000000002" in path

    refuse(monkeypatch, node_ground, moment, is_of_node)

    failure = save_second_badly(nodes, EVEN)

    require_nothing_saved(nodes, failure, 0 if node == "a" else 2)


def test_manifest_of_before_is_back_where_one_node_refuses_the_new_one(
    nodes, monkeypatch
):
    publish = node_ground.publish_staged_manifest
    ids = {}

    def refuse_second(staged):
        if staged.before is not None and "/b/" in str(staged.directory):
            raise StorageError("disk full", errno=errno.ENOSPC)
        publish(staged)

    monkeypatch.setattr(node_ground, "publish_staged_manifest", refuse_second)

    def save_twice(comm):
        ids[comm.rank] = save(comm, nodes, copies=1).checkpoint_id
        save(comm, nodes, copies=1, overwrite=True)

    failure = failure_on_ranks(4, nodes.seat(EVEN, save_twice))

    assert isinstance(failure, StorageError)
    for lost in "ab":
        require_whole_without(nodes, {lost}, "ab")
        directory = step_path(nodes.run_on(lost), 1)
        assert mpickpt.read_manifest(directory).checkpoint_id == ids[0]
        assert len(ranks_in(files_on(nodes, [lost])[lost])) == 4


def test_outcome_is_unknown_where_a_manifest_cannot_be_taken_back(nodes, monkeypatch):
    refuse(
        monkeypatch,
        node_ground,
        "publish_staged_manifest",
        lambda staged: on_node_b(staged.directory),
    )
    refuse(
        monkeypatch,
        manifest_publishing,
        "unlink_durably",
        lambda path: "/a/" in str(path),
    )

    failure = save_second_badly(nodes, EVEN)

    assert isinstance(failure, StorageError)
    assert failure.outcome == "unknown"
    assert "is unknown" in str(failure)
    # A manifest may refer to them.
    assert len(ranks_in(files_on(nodes, ["b"], 2)["b"])) == 4
