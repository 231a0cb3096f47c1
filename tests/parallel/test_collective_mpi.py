"""Collectives on real communicators of every kind."""

import time

import numpy as np
import pytest
from mpi4py import MPI

from mpickpt.errors import CheckpointError, StorageError
from mpickpt.parallel.collective import check_launcher, conversations_of, run

TIMEOUT_S = 30.0


def split_by_parity():
    return MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, -MPI.COMM_WORLD.rank)


def cartesian():
    size = MPI.COMM_WORLD.size
    return MPI.COMM_WORLD.Create_cart(MPI.Compute_dims(size, 2), [True, False])


COMMUNICATORS = {
    "world": lambda: MPI.COMM_WORLD,
    "self": lambda: MPI.COMM_SELF,
    "duplicate": lambda: MPI.COMM_WORLD.Dup(),
    "split": split_by_parity,
    "cartesian": cartesian,
}


@pytest.fixture(params=list(COMMUNICATORS))
def any_comm(request):
    comm = COMMUNICATORS[request.param]()
    yield comm
    if comm not in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Free()


@pytest.fixture
def talk(any_comm):
    return conversations_of(any_comm, TIMEOUT_S).save


def test_ranks_are_those_of_the_communicator(any_comm, talk):
    assert (talk.rank, talk.size) == (any_comm.rank, any_comm.size)


def test_allgather_returns_records_in_rank_order(talk):
    for turn in range(10):
        records = run(talk.allgather(b"%d:%04d" % (turn, talk.rank), "p"))

        assert records == [b"%d:%04d" % (turn, rank) for rank in range(talk.size)]


def test_bcast_returns_payload_of_any_root_and_length(talk):
    for root in {0, talk.size - 1}:
        for length in (0, 1, 100_000):
            own = b"b" * length if talk.rank == root else None

            assert run(talk.bcast(own, "p", root)) == b"b" * length


def test_bcast_into_takes_many_rounds(talk, monkeypatch):
    monkeypatch.setattr("mpickpt.parallel.conversation.ROUND_NBYTES", 1000)
    wanted = np.arange(5001, dtype=np.int64).astype(np.uint8)
    view = wanted.copy() if talk.rank == 0 else np.zeros_like(wanted)

    run(talk.bcast_into(view, 0, "p"))

    np.testing.assert_array_equal(view, wanted)


def test_exchange_delivers_sparse_messages_over_many_rounds(talk):
    for turn in range(30):
        sent = {
            dest: b"%d" % turn * (talk.rank + 1)
            for dest in range(talk.size)
            if (talk.rank + dest + turn) % 3 == 0
        }

        arrived = run(talk.exchange(sent, "p"))

        assert arrived == {
            source: b"%d" % turn * (source + 1)
            for source in range(talk.size)
            if (talk.rank + source + turn) % 3 == 0
        }


def test_exchange_carries_empty_and_large_messages(talk):
    last = talk.size - 1
    sent = {0: b"", last: bytes(3_000_000)}

    arrived = run(talk.exchange(sent, "p"))

    lengths = {source: len(message) for source, message in arrived.items()}
    if talk.rank == last:
        assert lengths == dict.fromkeys(range(talk.size), 3_000_000)
    else:
        assert lengths == (dict.fromkeys(range(talk.size), 0) if talk.rank == 0 else {})


def test_gather_returns_payloads_on_root_only(talk):
    gathered = run(talk.gather(b"g" * talk.rank, "p"))

    expected = [b"g" * rank for rank in range(talk.size)]
    assert gathered == (expected if talk.rank == 0 else None)


def test_agree_raises_the_same_error_everywhere(talk):
    def call():
        if talk.rank == talk.size - 1:
            raise StorageError("full", errno=28, path="/scratch")

    with pytest.raises(StorageError) as caught:
        run(talk.agree(call, "p"))

    assert (caught.value.errno, caught.value.path) == (28, "/scratch")
    if talk.size > 1:
        assert caught.value.rank == talk.size - 1
        assert list(caught.value.failures) == [talk.size - 1]
    assert run(talk.agree(lambda: talk.rank, "p")) == talk.rank


def test_on_root_returns_bytes_or_raises_everywhere(talk):
    assert run(talk.on_root(lambda: b"from root", "p")) == b"from root"
    with pytest.raises(KeyError):
        run(talk.on_root(lambda: {}["absent"], "p"))


def test_work_outlasts_the_deadline_while_ranks_are_busy(comm):
    talk = conversations_of(comm, 1.0).save

    value = run(talk.work(lambda _: _slept(2.5 if talk.rank == 0 else 0), "p"))

    assert value == "slept"


def test_work_of_all_ends_soon_after_one_fails(any_comm):
    talk = conversations_of(any_comm, 5.0).save

    def call(cancelled):
        if talk.rank == 0:
            raise StorageError("full", errno=28)
        cancelled.wait(TIMEOUT_S)

    begin = time.monotonic()
    with pytest.raises(StorageError):
        run(talk.work(call, "p"))

    assert time.monotonic() - begin < 10


def test_transfers_arrive_from_every_rank(talk):
    transfers = [
        talk.send(np.full(70_000, talk.rank, np.uint8), dest)
        for dest in range(talk.size)
    ]
    sources, buffer = set(), np.zeros(70_000, np.uint8)
    patience = talk.patience("transfers")
    while len(sources) < talk.size:
        received = talk.receive(buffer)
        while received is not None and not received.done():
            patience.check()
        if received is not None:
            assert received.nbytes == 70_000
            assert (buffer == received.source).all()
            sources.add(received.source)
        patience.check()
    while not all([transfer.done() for transfer in transfers]):
        patience.check()

    run(talk.allgather(b"", "end"))


def test_messages_never_meet_the_users(any_comm, talk):
    right = (any_comm.rank + 1) % any_comm.size
    request = any_comm.irecv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)

    run(talk.exchange({right: b"library"}, "p"))
    any_comm.send("user", dest=right)

    assert request.wait() == "user"


def test_conversations_of_one_communicator_go_on_side_by_side(any_comm):
    talks = conversations_of(any_comm, TIMEOUT_S)
    pending = talks.pending.bcast(b"pending" * 1000, "p")
    first_step = next(pending, None)

    assert run(talks.save.allgather(b"save", "p"))[0] == b"save"
    if first_step is not None:
        assert run(pending) == b"pending" * 1000


def test_many_communicators_are_opened_and_freed():
    for _ in range(20):
        comm = MPI.COMM_WORLD.Dup()
        assert run(conversations_of(comm, TIMEOUT_S).load.allgather(b"x", "p"))
        comm.Free()


def test_intercommunicator_is_refused():
    if MPI.COMM_WORLD.size == 1:
        local = MPI.COMM_SELF
        with pytest.raises(TypeError):
            conversations_of(type("Comm", (), {"Is_inter": lambda _: True})())
        assert local.size == 1
        return
    world = MPI.COMM_WORLD
    local = world.Split(world.rank % 2, world.rank)
    inter = local.Create_intercomm(0, world, 1 - world.rank % 2)

    with pytest.raises(TypeError, match="intercommunicator"):
        conversations_of(inter)

    inter.Free()
    local.Free()


def test_launcher_check_lets_proper_worlds_pass(any_comm, shared_tmp_path):
    check_launcher(any_comm, shared_tmp_path)


def test_launcher_check_refuses_split_worlds_in_one_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", "0")
    if MPI.COMM_WORLD.size > 1:
        return check_launcher(MPI.COMM_WORLD, tmp_path)
    check_launcher(MPI.COMM_WORLD, tmp_path)
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(CheckpointError, match="PMI_SIZE"):
        check_launcher(MPI.COMM_WORLD, tmp_path)
    monkeypatch.setenv("MPICKPT_LAUNCHER_CHECK", "0")
    check_launcher(MPI.COMM_WORLD, tmp_path)


def _slept(seconds):
    time.sleep(seconds)
    return "slept"
