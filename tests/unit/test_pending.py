"""A save that goes on while the program does: what it copies, when it is over."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest

import mpickpt
from mpickpt import (
    PerRank,
    Replicated,
    Sharded,
    load_sharded,
    save_sharded,
    save_sharded_async,
)
from mpickpt.parallel import pending as pending_module
from mpickpt.parallel.pending_save import PendingSave
from tests import ranks_as_threads
from tests.ranks_as_threads import run_ranks
from tests.states import (
    DTYPES,
    failure_on_ranks,
    image_of,
    on_ranks,
    random_array,
    shard_digests,
)

SIZE = 2


def tree_of(rank, step=1):
    return {
        "w": Sharded.block(np.full((5, 2), step + rank / 10)),
        "scale": Replicated(np.full(3, step)),
        "own": PerRank(np.arange(rank + 2) + step),
        "step": step,
    }


def complete(request):
    while not request.Test():
        time.sleep(0)


def everywhere(comm, flag):
    """Tell whether the flag is set on all ranks, once all have come."""
    flags = bytearray(comm.size)
    complete(comm.Iallgather(bytes([flag]), flags))
    return all(flags)


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def no_rank_writes():
    return not any(t.name == "mpickpt-work" for t in threading.enumerate())


@pytest.fixture
def held(monkeypatch):
    """Writes of steps wait until their name is let go on."""
    released = {}
    write = pending_module.write_staged_file

    def waiting(path, staged, style, cancelled):
        gate = released.get(path.parent.name)
        while gate is not None and not gate.wait(0.002):
            if cancelled.is_set():
                raise mpickpt.CheckpointError("cancelled")
        return write(path, staged, style, cancelled)

    monkeypatch.setattr(pending_module, "write_staged_file", waiting)
    return lambda name: released.setdefault(name, threading.Event())


def fail_writes(monkeypatch, part):
    write = pending_module.write_staged_file

    def failing(path, *arguments):
        if part in str(path):
            raise mpickpt.StorageError("disk full", errno=28, path=str(path))
        return write(path, *arguments)

    monkeypatch.setattr(pending_module, "write_staged_file", failing)


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_state_may_change_as_soon_as_the_call_returns(tmp_path, progress):
    path = tmp_path / "c"

    def save(comm):
        tree = tree_of(comm.rank)
        pending = save_sharded_async(tree, path, step=1, comm=comm, progress=progress)
        tree["w"].data[...] = np.nan
        tree["scale"].data[...] = -1
        tree["own"].data[...] = -1
        tree["step"] = -1
        result = pending.result()
        assert result.path == path

    on_ranks(SIZE, save)

    for rank, tree in enumerate(
        on_ranks(SIZE, lambda comm: load_sharded(path, comm=comm))
    ):
        expected = tree_of(rank)
        for name in ("w", "scale", "own"):
            assert image_of(tree[name].data) == image_of(expected[name].data)
        assert tree["step"] == 1


def test_shards_are_those_of_a_blocking_save(tmp_path):
    def save(comm):
        tree = {
            str(number): PerRank(random_array(dtype, (3, 5), 7 * number + comm.rank))
            for number, dtype in enumerate(DTYPES)
        }
        tree["fortran"] = PerRank(np.asfortranarray(np.arange(12.0).reshape(3, 4)))
        tree["strided"] = Sharded.block(np.arange(40.0)[::2])
        tree["empty"] = PerRank(np.empty((0, 3)))
        tree["scalar"] = PerRank(np.array(7))
        mpickpt.save_sharded(tree, tmp_path / "a", step=1, comm=comm)
        for name in ("b", "c"):
            save_sharded_async(tree, tmp_path / name, step=1, comm=comm).result()

    on_ranks(SIZE, save)

    digests = shard_digests(tmp_path / "a")
    assert shard_digests(tmp_path / "b") == digests
    assert shard_digests(tmp_path / "c") == digests


def test_shards_are_right_when_the_layout_changes_between_saves(tmp_path):
    trees = [
        {"a": np.full(30_000, 1.0), "b": np.full(100, 2.0)},
        {"b": np.full(10, 3.0)},
        {"a": np.full(50_000, 4.0), "c": np.full(7, 5, np.int8)},
        {"a": np.full(30_000, 6.0), "b": np.full(100, 7.0)},
    ]

    for number, tree in enumerate(trees):
        save_sharded_async(tree, tmp_path / f"a{number}", step=number).result()
        mpickpt.save_sharded(tree, tmp_path / f"b{number}", step=number)

    for number in range(len(trees)):
        assert shard_digests(tmp_path / f"a{number}") == shard_digests(
            tmp_path / f"b{number}"
        )


def test_save_is_over_within_six_polls_after_the_slowest_rank_has_written(tmp_path):
    def save(comm):
        pending = save_sharded_async(
            tree_of(comm.rank), tmp_path / "c", step=1, comm=comm, progress="poll"
        )
        everywhere(comm, True)
        wait_until(no_rank_writes)
        n_polls = 0
        while not everywhere(comm, pending.done):
            n_polls += not pending.done
            pending.poll()
        return n_polls

    n_polls = on_ranks(4, save)

    assert max(n_polls) <= 6
    assert mpickpt.read_manifest(tmp_path / "c").step == 1


def test_writing_begins_without_a_poll(tmp_path):
    def save(comm):
        pending = save_sharded_async(
            tree_of(comm.rank), tmp_path / "c", step=1, comm=comm, progress="poll"
        )
        wait_until(lambda: len(list((tmp_path / "c").glob("rank*.h5"))) == SIZE)
        was_done = everywhere(comm, pending.done)
        pending.result()
        return was_done

    assert on_ranks(SIZE, save) == [False, False]


def test_thread_publishes_though_nobody_polls(tmp_path):
    def save(comm):
        pending = save_sharded_async(
            tree_of(comm.rank), tmp_path / "c", step=1, comm=comm, progress="thread"
        )
        wait_until(lambda: pending.done)

    on_ranks(SIZE, save)

    assert mpickpt.read_manifest(tmp_path / "c").step == 1


def test_poll_and_result_agree_once_the_save_is_over(tmp_path):
    pending = save_sharded_async({"x": np.arange(3)}, tmp_path / "c", step=1)

    result = pending.result()

    assert pending.done
    assert pending.poll()
    assert not pending.has_failed
    assert pending.result() is result


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_failure_on_one_rank_is_raised_by_result_on_all(
    tmp_path, monkeypatch, progress
):
    fail_writes(monkeypatch, "c/rank00001")

    def save(comm):
        save_sharded_async(
            tree_of(comm.rank), tmp_path / "b", step=1, comm=comm, progress=progress
        ).result()
        save_sharded_async(
            tree_of(comm.rank), tmp_path / "c", step=2, comm=comm, progress=progress
        ).result()

    error = failure_on_ranks(SIZE, save)

    assert isinstance(error, mpickpt.StorageError)
    assert (error.errno, error.rank) == (28, 1)
    assert not (tmp_path / "c").exists()
    assert mpickpt.read_manifest(tmp_path / "b").step == 1


def test_failure_that_nobody_asked_for_is_raised_by_the_next_save_once(
    tmp_path, monkeypatch
):
    fail_writes(monkeypatch, "b/rank00001")

    def save(comm):
        tree = tree_of(comm.rank)
        save_sharded_async(tree, tmp_path / "b", step=1, comm=comm)
        with pytest.raises(mpickpt.StorageError, match="disk full"):
            save_sharded_async(tree, tmp_path / "c", step=2, comm=comm)
        save_sharded_async(tree, tmp_path / "c", step=2, comm=comm).result()

    on_ranks(SIZE, save)

    assert mpickpt.read_manifest(tmp_path / "c").step == 2


def test_failure_that_was_raised_is_not_raised_again(tmp_path, monkeypatch):
    fail_writes(monkeypatch, "b/rank00000")
    tree = {"x": np.arange(3)}
    pending = save_sharded_async(tree, tmp_path / "b", step=1)
    with pytest.raises(mpickpt.StorageError):
        pending.result()

    result = save_sharded_async(tree, tmp_path / "c", step=2).result()

    assert result.step == 2


@pytest.mark.parametrize("progress", ["poll", "thread"])
@pytest.mark.parametrize("slow", [0, 1])
def test_skip_is_agreed_though_one_rank_alone_is_busy(
    tmp_path, monkeypatch, progress, slow
):
    gate = threading.Event()
    write = pending_module.write_staged_file

    def waiting(path, *arguments):
        if f"b/rank0000{slow}" in str(path):
            gate.wait(20)
        return write(path, *arguments)

    monkeypatch.setattr(pending_module, "write_staged_file", waiting)

    def save(comm):
        tree, options = tree_of(comm.rank), {"comm": comm, "progress": progress}
        first = save_sharded_async(tree, tmp_path / "b", step=1, **options)
        second = save_sharded_async(
            tree, tmp_path / "c", step=2, on_busy="skip", **options
        )
        everywhere(comm, True)
        gate.set()
        first.result()
        return second

    assert on_ranks(SIZE, save) == [None, None]
    assert not (tmp_path / "c").exists()


def test_different_wishes_when_busy_are_an_error_on_all_ranks(tmp_path):
    def save(comm):
        on_busy = ("wait", "skip")[comm.rank]
        save_sharded_async(
            tree_of(comm.rank), tmp_path / "c", step=1, comm=comm, on_busy=on_busy
        )

    error = failure_on_ranks(SIZE, save)

    assert isinstance(error, mpickpt.CallMismatchError)
    assert error.rank == 1


def test_thread_is_refused_where_mpi_does_not_allow_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_as_threads, "Query_thread", lambda: 1)

    def save(comm, progress):
        return save_sharded_async(
            tree_of(comm.rank), tmp_path / "c", step=1, comm=comm, progress=progress
        ).result()

    error = failure_on_ranks(SIZE, lambda comm: save(comm, "thread"))
    on_ranks(SIZE, lambda comm: save(comm, "auto"))

    assert "THREAD_MULTIPLE" in str(error)
    assert mpickpt.read_manifest(tmp_path / "c").step == 1


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_abandoned_save_is_unpublished_and_leaves_no_file(tmp_path, held, progress):
    held("c")

    def abandon(comm):
        pending = save_sharded_async(
            tree_of(comm.rank), tmp_path / "c", step=1, comm=comm, progress=progress
        )
        pending.abandon()
        return pending.done

    assert on_ranks(SIZE, abandon) == [True, True]
    assert not (tmp_path / "c" / "manifest.json").exists()
    assert not list(tmp_path.rglob("rank*"))


def test_other_ranks_hear_of_an_abandoned_save_soon(tmp_path, held):
    held("c")

    def abandon(comm):
        pending = save_sharded_async(
            tree_of(comm.rank), tmp_path / "c", step=1, comm=comm, progress="poll"
        )
        if comm.rank == 1:
            return pending.abandon()
        return pending.result()

    begin = time.monotonic()
    outcomes = run_ranks(SIZE, abandon)

    assert isinstance(outcomes[0], mpickpt.CollectiveTimeoutError)
    assert outcomes[0].missing_ranks == [1]
    assert time.monotonic() - begin < 10


def test_abandoned_save_of_one_process_harms_no_later_one(tmp_path, held):
    held("b")
    tree = {"x": np.arange(3)}
    save_sharded_async(tree, tmp_path / "b", step=1).abandon()

    save_sharded_async(tree, tmp_path / "c", step=2).result()

    assert not (tmp_path / "b" / "manifest.json").exists()
    assert mpickpt.read_manifest(tmp_path / "c").step == 2


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_arrays_of_the_program_live_no_longer_for_being_saved(tmp_path, held, progress):
    gate = held("c")
    array = np.arange(1000.0)
    reference = weakref.ref(array)

    pending = save_sharded_async(
        {"x": array}, tmp_path / "c", step=1, progress=progress
    )
    del array
    gc.collect()
    is_alive = reference() is not None
    gate.set()
    pending.result()

    assert not is_alive


def test_interrupt_during_a_poll_comes_through(tmp_path):
    def interrupted():
        yield None
        raise KeyboardInterrupt

    pending = PendingSave(1, tmp_path, interrupted(), threaded=False)
    pending.poll()

    with pytest.raises(KeyboardInterrupt):
        pending.poll()

    assert pending.has_failed


@pytest.mark.parametrize("progress", ["poll", "thread"])
def test_blocking_save_waits_for_the_one_under_way(tmp_path, held, progress):
    held("c")
    opened = threading.Timer(0.2, held("c").set)

    def save_both(comm):
        first = save_sharded_async(
            tree_of(comm.rank, 1), tmp_path / "c", step=1, comm=comm, progress=progress
        )
        if comm.rank == 0:
            opened.start()
        # To the same path: the files of one must not be swept by the other.
        save_sharded(
            tree_of(comm.rank, 2), tmp_path / "c", step=2, comm=comm, overwrite=True
        )
        assert first.done
        assert first.result().step == 1
        loaded = load_sharded(tmp_path / "c", comm=comm)
        return loaded["step"], loaded["w"].data[0, 0]

    assert on_ranks(3, save_both) == [(2, 2 + rank / 10) for rank in range(3)]


@pytest.mark.parametrize(
    "wrong",
    [{"progress": "often"}, {"on_busy": "later"}, {"options": 5}, {"path": None}],
)
def test_wrong_argument_on_one_rank_is_the_same_error_on_all(tmp_path, wrong):
    def save_one(comm):
        given = {"path": tmp_path / "c"} | (wrong if comm.rank == 1 else {})
        save_sharded_async({}, given.pop("path"), step=1, comm=comm, **given)

    failure = failure_on_ranks(3, save_one)

    assert isinstance(failure, TypeError | ValueError)
    assert failure.rank == 1
    assert list(tmp_path.iterdir()) == []


def test_path_that_is_published_is_refused_before_anything_is_copied(tmp_path):
    tree = {"x": np.arange(3)}
    save_sharded_async(tree, tmp_path / "c", step=1).result()

    with pytest.raises(mpickpt.CheckpointExistsError):
        save_sharded_async(tree, tmp_path / "c", step=2)


def test_bad_argument_is_refused(tmp_path):
    with pytest.raises(ValueError, match="on_busy"):
        save_sharded_async({}, tmp_path / "c", step=1, on_busy="later")
    with pytest.raises(ValueError, match="progress"):
        save_sharded_async({}, tmp_path / "c", step=1, progress="later")
