"""Collectives with ranks as threads: a failing or missing rank takes milliseconds."""

import copy
import os
import pickle  # noqa: TID251 -- user programs do pickle errors; the test must too.
import threading
import time

import numpy as np
import pytest

from mpickpt import SaveOptions, save_sharded
from mpickpt.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    CorruptShardError,
    StorageError,
)
from mpickpt.parallel import line as line_module
from mpickpt.parallel import roll_call
from mpickpt.parallel.collective import conversations_of, resolve_timeout_s, run
from tests.ranks_as_threads import run_ranks

SIZES = [1, 2, 4, 7]
TIMEOUT_S = 0.3


@pytest.fixture(autouse=True)
def short_roll_call(monkeypatch):
    monkeypatch.setattr(roll_call, "LISTEN_EVERY_S", 0.05)
    monkeypatch.setattr(roll_call, "ROLL_CALL_S", 0.4)
    monkeypatch.setattr(roll_call, "VERDICT_S", 1.0)


def on_ranks(size, steps_of, timeout_s=10.0):
    """Run ``steps_of(talk)`` on every rank, all of which come back."""

    def rank_main(comm):
        return run(steps_of(conversations_of(comm, timeout_s).save))

    outcomes = run_ranks(size, rank_main)
    assert not any(type(outcome) is TimeoutError for outcome in outcomes)
    return outcomes


def texts(errors):
    return [f"{type(error).__name__}: {error}" for error in errors]


@pytest.mark.parametrize("size", SIZES)
def test_allgather_returns_records_in_rank_order(size):
    outcomes = on_ranks(size, lambda talk: talk.allgather(b"%02d" % talk.rank, "p"))

    assert outcomes == [[b"%02d" % rank for rank in range(size)]] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("payload", [b"", b"x" * 100_000])
def test_bcast_returns_payload_of_any_root(size, payload):
    root = size - 1

    outcomes = on_ranks(
        size, lambda t: t.bcast(payload if t.rank == root else None, "p", root)
    )

    assert outcomes == [payload] * size


def test_bcast_into_fills_in_rounds(monkeypatch):
    monkeypatch.setattr("mpickpt.parallel.conversation.ROUND_NBYTES", 10)
    wanted = np.arange(37, dtype=np.uint8)

    def fill(talk):
        view = wanted.copy() if talk.rank == 0 else np.zeros(37, np.uint8)
        yield from talk.bcast_into(view, 0, "p")
        return view.tolist()

    assert on_ranks(3, fill) == [wanted.tolist()] * 3


@pytest.mark.parametrize("size", SIZES)
def test_exchange_delivers_sparse_messages_over_many_rounds(size):
    def ring(talk):
        for turn in range(20):
            message = b"%d from %d" % (turn, talk.rank)
            arrived = yield from talk.exchange({(talk.rank + 1) % size: message}, "p")
            source = (talk.rank - 1) % size
            assert arrived == {source: b"%d from %d" % (turn, source)}
        return (yield from talk.exchange({}, "p"))

    assert on_ranks(size, ring) == [{}] * size


@pytest.mark.parametrize("size", SIZES)
def test_gather_returns_payloads_on_root_only(size):
    root = size // 2

    outcomes = on_ranks(size, lambda t: t.gather(b"g" * t.rank, "p", root))

    expected = [None] * size
    expected[root] = [b"g" * rank for rank in range(size)]
    assert outcomes == expected


@pytest.mark.parametrize("size", SIZES)
def test_agree_returns_own_value_when_none_fails(size):
    assert on_ranks(size, lambda t: t.agree(lambda: t.rank, "p")) == list(range(size))


@pytest.mark.parametrize("size", [2, 4, 7])
def test_agree_raises_lowest_failing_ranks_error_everywhere(size):
    def fail_from_one(talk):
        def call():
            if talk.rank >= 1:
                raise StorageError(f"disk of {talk.rank}", errno=28, path="/p")

        return talk.agree(call, "p")

    errors = on_ranks(size, fail_from_one)

    assert {type(error) for error in errors} == {StorageError}
    assert len(set(texts(errors))) == 1
    for error in errors:
        assert (error.rank, error.errno, error.path) == (1, 28, "/p")
        assert error.message == "disk of 1"
        assert sorted(error.failures) == list(range(1, size))
        assert [e.message for e in error.failures.values()] == [
            f"disk of {rank}" for rank in range(1, size)
        ]


def test_agree_keeps_own_failure_as_cause():
    def fail_on_one(talk):
        def call():
            if talk.rank == 1:
                raise OSError(5, "I/O error")

        return talk.agree(call, "p")

    spared, failed = on_ranks(2, fail_on_one)

    assert type(spared) is type(failed) is CheckpointError
    assert "OSError" in spared.message
    assert spared.__cause__ is None
    assert isinstance(failed.__cause__, OSError)


@pytest.mark.parametrize(
    "cls", [TypeError, ValueError, KeyError, MemoryError, NotImplementedError]
)
def test_agree_raises_plain_builtin_errors_as_themselves(cls):
    def fail_on_one(talk):
        def call():
            if talk.rank == 1:
                raise cls("model/w")

        return talk.agree(call, "p")

    errors = on_ranks(3, fail_on_one)

    assert {type(error) for error in errors} == {cls}
    assert all("model/w" in str(error) and error.rank == 1 for error in errors)


def test_agree_names_every_failing_rank_beyond_those_that_say_how(monkeypatch):
    monkeypatch.setattr("mpickpt.parallel.conversation.MOST_RECORDS", 2)

    def fail(talk):
        return talk.agree(lambda: int("no"), "p")

    errors = on_ranks(5, fail)

    assert all(sorted(error.failures) == [0, 1, 2, 3, 4] for error in errors)
    assert all(isinstance(error.failures[4], CheckpointError) for error in errors)


def test_agreed_error_survives_pickle_and_copy():
    def fail(talk):
        def call():
            raise CorruptShardError("bad", path="r.h5", expected="a", actual="b")

        return talk.agree(call, "p")

    for error in on_ranks(2, fail):
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert str(twin) == str(error)
            assert sorted(twin.failures) == [0, 1]


def test_agree_goes_on_after_an_agreed_error():
    def fail_then_gather(talk):
        with pytest.raises(ValueError, match="once"):
            yield from talk.agree(lambda: _raise(ValueError("once")), "p")
        return (yield from talk.allgather(b"x", "p"))

    assert on_ranks(4, fail_then_gather) == [[b"x"] * 4] * 4


@pytest.mark.parametrize("size", SIZES)
def test_on_root_returns_roots_bytes(size):
    calls = []

    def call_on_root(talk):
        return talk.on_root(lambda: calls.append(talk.rank) or b"seen", "p")

    assert on_ranks(size, call_on_root) == [b"seen"] * size
    assert calls == [0]


@pytest.mark.parametrize("size", SIZES)
def test_on_root_raises_roots_error_everywhere(size):
    def fail(talk):
        return talk.on_root(lambda: _raise(StorageError("full", errno=28)), "p")

    errors = on_ranks(size, fail)

    assert {type(error) for error in errors} == {StorageError}
    assert {error.errno for error in errors} == {28}


@pytest.mark.parametrize("size", SIZES)
def test_work_returns_own_value(size):
    assert on_ranks(size, lambda t: t.work(lambda _: t.rank, "p")) == list(range(size))


@pytest.mark.parametrize("size", [2, 4])
def test_work_longer_than_deadline_is_waited_for(size):
    def work(talk):
        def call(cancelled):
            cancelled.wait(3 * TIMEOUT_S if talk.rank == 0 else 0)
            return talk.rank

        return talk.work(call, "p")

    assert on_ranks(size, work, timeout_s=TIMEOUT_S) == list(range(size))


@pytest.mark.parametrize("size", [2, 4])
def test_work_cancels_others_and_raises_the_real_error(size):
    def work(talk):
        def call(cancelled):
            if talk.rank == 1:
                raise StorageError("full", errno=28)
            assert cancelled.wait(10)
            raise InterruptedError("cancelled")

        return talk.work(call, "p")

    errors = on_ranks(size, work, timeout_s=2.0)

    assert {type(error) for error in errors} == {StorageError}
    assert {(error.rank, *error.failures) for error in errors} == {(1, 1)}


def test_work_without_movement_fails_on_every_rank():
    def work(talk):
        def call(cancelled):
            cancelled.wait(10 if talk.rank == 1 else 0)

        return talk.work(call, "p", moved=lambda: 0)

    errors = on_ranks(3, work, timeout_s=TIMEOUT_S)

    assert {type(error) for error in errors} == {StorageError}
    assert {error.rank for error in errors} == {1}


@pytest.mark.parametrize("size", [1, 4])
def test_send_and_receive_move_buffers_both_ways(size):
    def swap(talk):
        outgoing = np.full(1000, talk.rank, np.uint8)
        incoming = np.zeros(2000, np.uint8)
        transfer = talk.send(outgoing, (talk.rank + 1) % size, tag=3)
        patience = talk.patience("swap")
        while (received := talk.receive(incoming, tag=3)) is None:
            patience.check()
            yield None
        while not (received.done() and transfer.done()):
            patience.check()
            yield None
        return received.source, received.nbytes, int(incoming[999]), int(incoming[1000])

    assert on_ranks(size, swap) == [
        ((rank - 1) % size, 1000, (rank - 1) % size, 0) for rank in range(size)
    ]


def absent_rank(missing, steps_of, *, size=4):
    """Run with one rank that opens the conversation and then stays away."""
    over = threading.Event()

    def rank_main(comm):
        talk = conversations_of(comm, TIMEOUT_S).save
        if comm.rank == missing:
            over.wait(15)
            return None
        try:
            run(steps_of(talk))
        except CheckpointError as error:
            return error, talk
        finally:
            arrived.append(comm.rank)
            if len(arrived) == size - 1:
                over.set()

    arrived = []
    outcomes = run_ranks(size, rank_main)
    return [outcome for rank, outcome in enumerate(outcomes) if rank != missing]


@pytest.mark.parametrize("missing", [0, 1, 3])
@pytest.mark.parametrize(
    "steps_of",
    [
        pytest.param(lambda t: t.allgather(b"x", "the phase"), id="allgather"),
        pytest.param(lambda t: t.settle(None, "the phase"), id="settle"),
        pytest.param(lambda t: t.exchange({}, "the phase"), id="exchange"),
        pytest.param(lambda t: t.work(lambda _: None, "the phase"), id="work"),
    ],
)
def test_missing_rank_is_named_on_every_other(missing, steps_of):
    begin = time.monotonic()
    outcomes = absent_rank(missing, steps_of)

    assert time.monotonic() - begin < 5
    for error, _ in outcomes:
        assert type(error) is CollectiveTimeoutError
        assert error.missing_ranks == [missing]
        assert error.phase == "the phase"
        assert f"rank {missing} did not arrive" in str(error)


def test_later_calls_raise_at_once_after_a_timeout():
    for error, talk in absent_rank(2, lambda t: t.allgather(b"x", "p")):
        begin = time.monotonic()

        with pytest.raises(CollectiveTimeoutError) as later:
            run(talk.allgather(b"x", "later"))

        assert time.monotonic() - begin < 0.1
        assert later.value.missing_ranks == [2]
        assert error is talk.broken


@pytest.mark.parametrize("missing", [0, 2])
def test_rank_that_never_makes_its_first_call_is_named(missing):
    over = threading.Event()

    def rank_main(comm):
        if comm.rank == missing:
            return over.wait(10)
        try:
            conversations_of(comm, TIMEOUT_S)
        except CollectiveTimeoutError as first:
            with pytest.raises(CollectiveTimeoutError):
                conversations_of(comm, TIMEOUT_S)
            return first
        finally:
            arrived.append(comm.rank)
            if len(arrived) == 3:
                over.set()

    arrived = []
    outcomes = run_ranks(4, rank_main)

    errors = [o for rank, o in enumerate(outcomes) if rank != missing]
    assert [error.missing_ranks for error in errors] == [[missing]] * 3


def test_save_that_a_rank_never_calls_says_that_it_is_unpublished(tmp_path):
    over = threading.Event()

    def rank_main(comm):
        if comm.rank == 1:
            return over.wait(10)
        options = SaveOptions(timeout_s=TIMEOUT_S)
        try:
            for _ in range(2):
                with pytest.raises(CollectiveTimeoutError) as late:
                    save_sharded({}, tmp_path / "c", step=1, comm=comm, options=options)
                outcomes.append(late.value.outcome)
        finally:
            over.set()

    outcomes = []
    run_ranks(2, rank_main)

    assert outcomes == ["unpublished"] * 2


@pytest.mark.parametrize("interrupted", [0, 2])
def test_interrupted_rank_raises_and_others_learn_long_before_the_deadline(interrupted):
    def rank_main(comm):
        talk = conversations_of(comm, 60.0).save
        if comm.rank == interrupted:
            steps = talk.exchange({1: b"never matched"}, "p")
            next(steps)
            steps.throw(KeyboardInterrupt())
        run(talk.allgather(b"x", "p"))

    outcomes = run_ranks(4, rank_main, timeout_s=8)

    assert isinstance(outcomes.pop(interrupted), KeyboardInterrupt)
    assert [type(outcome) for outcome in outcomes] == [CollectiveTimeoutError] * 3
    assert all(outcome.missing_ranks == [interrupted] for outcome in outcomes)


def test_interrupt_inside_a_call_passes_and_is_told_to_others():
    def rank_main(comm):
        talk = conversations_of(comm, 60.0).save
        run(talk.agree(lambda: comm.rank != 1 or _raise(KeyboardInterrupt()), "p"))

    outcomes = run_ranks(3, rank_main, timeout_s=8)

    assert isinstance(outcomes[1], KeyboardInterrupt)
    assert isinstance(outcomes[0], CollectiveTimeoutError)
    assert isinstance(outcomes[2], CollectiveTimeoutError)


def test_buffers_of_an_abandoned_request_are_kept(monkeypatch):
    kept = []
    for module in ("messages", "line", "exchange"):
        monkeypatch.setattr(f"mpickpt.parallel.{module}.keep_forever", kept.append)
    record = b"record of the abandoned allgather"

    absent_rank(1, lambda t: t.allgather(record, "p"), size=2)

    assert any(record in str(value).encode() for value in kept)


def test_conversations_are_kept_with_the_communicator_and_freed_with_it():
    def rank_main(comm):
        first, second = conversations_of(comm, 1), conversations_of(comm, 2)
        lines = [t._line for t in (first.save, first.load, first.pending)]
        assert first.save._line is second.save._line
        assert (first.save.timeout_s, second.save.timeout_s) == (1, 2)
        assert len({id(line.comm) for line in lines}) == 3
        assert first.memory is second.memory
        comm.Free()
        return [line.comm.freed for line in lines]

    assert run_ranks(2, rank_main) == [[True] * 3] * 2


def test_conversation_alone_needs_no_communicator():
    talk = conversations_of(None).save

    assert (talk.rank, talk.size, talk.broken) == (0, 1, None)
    assert run(talk.allgather(b"x", "p")) == [b"x"]
    assert run(talk.exchange({0: b"self"}, "p")) == {0: b"self"}


def test_comm_of_another_kind_is_a_type_error():
    with pytest.raises(TypeError, match="got str"):
        conversations_of("COMM_WORLD")


def test_comm_that_was_freed_is_a_type_error():
    class Comm:
        def __bool__(self):
            return False

    with pytest.raises(TypeError, match="COMM_NULL"):
        conversations_of(Comm())


def test_timeout_argument_wins_over_environment(monkeypatch):
    assert resolve_timeout_s(None) == float(os.environ.get("MPICKPT_TIMEOUT_S", 600))
    monkeypatch.setenv("MPICKPT_TIMEOUT_S", "12.5")
    assert resolve_timeout_s(None) == 12.5
    assert resolve_timeout_s(3) == 3.0
    with pytest.raises(ValueError, match="above 0"):
        resolve_timeout_s(0)
    monkeypatch.setenv("MPICKPT_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="MPICKPT_TIMEOUT_S"):
        resolve_timeout_s(None)


def test_deadline_does_not_count_a_suspension():
    deadline = roll_call.Deadline(2.0)
    deadline._checked -= 3600

    assert not deadline.has_passed()


def test_tags_of_different_uses_do_not_meet():
    control = line_module.TAG_VERDICT

    assert control < line_module.TAG_EXCHANGE < line_module.TAG_EXCHANGE + 16
    assert line_module.TAG_EXCHANGE + 16 < line_module.TAG_TRANSFER


def _raise(error):
    raise error
