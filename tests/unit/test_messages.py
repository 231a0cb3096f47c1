from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

import mpickpt
from mpickpt import Sharded
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.layout_document import dump_layout_line
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.planning.layout import HeldArray, entry_of, owner_of
from mpickpt.planning.layout_rounds import descriptions, resolved_keys
from tests.benchmarks.messages import (
    FIRST_NBYTES,
    STATUS_NBYTES,
    Traffic,
    broadcast,
    load_in_place,
    new_layout,
    reshard_calls,
    steady_save,
)
from tests.benchmarks.simulation import delivered
from tests.ranks_as_threads import Comm, run_ranks

ROWS = 24


class CountingComm(Comm):
    """Counts what a rank calls on its duplicates, which share one tally."""

    def __init__(self, group, rank, tally=None):
        super().__init__(group, rank)
        self.tally = {"messages": [], "calls": []} if tally is None else tally

    def Idup(self):
        duplicate, request = super().Idup()
        made = CountingComm(duplicate._group, self._rank, self.tally)
        return made, request

    def Iallgather(self, record, incoming):
        self.tally["calls"].append(("allgather", len(record)))
        return super().Iallgather(record, incoming)

    def Ibcast(self, view, root):
        self.tally["calls"].append(("bcast", len(view)))
        return super().Ibcast(view, root)

    def Ibarrier(self):
        self.tally["calls"].append(("barrier", 0))
        return super().Ibarrier()

    def Issend(self, message, dest, tag):
        self.tally["messages"].append(len(message))
        return super().Issend(message, dest, tag)

    def taken(self):
        """Return the traffic since the last time, with this rank's messages."""
        calls, messages = self.tally["calls"], self.tally["messages"]
        self.tally.update(calls=[], messages=[])
        return Traffic(
            allgathers=Counter(n for what, n in calls if what == "allgather"),
            bcasts=Counter(n for what, n in calls if what == "bcast"),
            barriers=sum(what == "barrier" for what, _ in calls),
            messages=len(messages),
            nbytes=sum(messages),
        )


def run_counted(size, function):
    """Return what `function(comm)` returns on each rank; raise what any raised."""
    outcomes = run_ranks(
        size, lambda comm: function(CountingComm(comm._group, comm._rank)), 120.0
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def of_all(traffics):
    """Return the traffic of all ranks: the same calls on each, their messages added."""
    first = traffics[0]
    assert all(one.allgathers == first.allgathers for one in traffics)
    assert all(one.bcasts == first.bcasts for one in traffics)
    assert all(one.barriers == first.barriers for one in traffics)
    return replace(
        first,
        messages=sum(one.messages for one in traffics),
        nbytes=sum(one.nbytes for one in traffics),
    )


def beats_beyond(found, formula):
    """Return the heartbeats: a slow disk has more than one."""
    beats = found.allgathers[STATUS_NBYTES] - formula.allgathers[STATUS_NBYTES]
    assert beats >= 1
    return beats


def state_of(rank, size, arrays):
    rows = ROWS // size
    return {
        f"a{n}": Sharded(
            np.full(rows, n, "f4"), global_shape=(rows * size,), offset=(rank * rows,)
        )
        for n in range(arrays)
    }


def held_of(rank, size, arrays):
    rows = ROWS // size
    return [
        HeldArray(
            key=f"a{n}",
            kind="sharded",
            dtype="float32",
            global_shape=(rows * size,),
            boxes=(Hyperslab((rank * rows,), (rows,)),),
        )
        for n in range(arrays)
    ]


def row_nbytes(held):
    """Return the bytes of the rows that each owner sends to rank 0."""
    size = len(held)
    mail = delivered({r: descriptions(own, size) for r, own in enumerate(held)})
    entries = {r: [*map(entry_of, resolved_keys(mail.get(r, {})))] for r in range(size)}
    return {
        rank: len(
            msgspec.msgpack.encode(
                [
                    (e.key, e.kind, e.dtype, e.global_shape, dump_layout_line(e))
                    for e in own
                ]
            )
        )
        for rank, own in entries.items()
    }


@pytest.mark.parametrize(("size", "arrays"), [(2, 1), (3, 12), (5, 12), (8, 40)])
def test_messages_of_a_save_are_those_of_the_formula(size, arrays, tmp_path):
    def save_twice(comm):
        mpickpt.save_sharded({}, tmp_path / "0", step=0, comm=comm)  # duplicates
        comm.taken()
        found = []
        for step in (1, 2):
            state = state_of(comm.rank, size, arrays)
            mpickpt.save_sharded(state, tmp_path / f"{step}", step=step, comm=comm)
            found.append(comm.taken())
        return found

    new, steady = map(of_all, zip(*run_counted(size, save_twice), strict=True))

    beats = beats_beyond(steady, steady_save(0))
    assert steady == steady_save(beats)
    held = [held_of(rank, size, arrays) for rank in range(size)]
    expected = steady_save(0) + new_layout(held, row_nbytes(held))
    beats = beats_beyond(new, expected)
    assert new == expected + Traffic(allgathers=Counter({STATUS_NBYTES: beats}))


def test_a_new_layout_sends_at_most_twice_for_each_array_of_each_rank():
    size, arrays = 16, 40
    held = [held_of(rank, size, arrays) for rank in range(size)]

    traffic = new_layout(held, dict.fromkeys(range(size), 0))

    owners = {owner_of(f"a{n}", size) for n in range(arrays)}
    assert traffic.messages == 2 * sum(len(owners - {rank}) for rank in range(size)) + (
        size - 1
    )


@pytest.mark.parametrize(("size", "arrays"), [(2, 1), (4, 12)])
def test_messages_of_a_load_are_those_of_the_formula(size, arrays, tmp_path):
    path = tmp_path / "c"

    def save_and_load(comm):
        mpickpt.save_sharded(state_of(comm.rank, size, arrays), path, step=0, comm=comm)
        comm.taken()
        mpickpt.load_sharded(path, comm=comm)
        return comm.taken()

    found = of_all(run_counted(size, save_and_load))

    nbytes = (path / MANIFEST_NAME).stat().st_size
    beats = beats_beyond(found, load_in_place(nbytes, 0))
    assert found == load_in_place(nbytes, beats)


@pytest.mark.parametrize(("saved", "size", "arrays"), [(4, 2, 1), (2, 3, 9), (3, 6, 2)])
def test_collectives_of_a_reshard_are_those_of_the_formula(
    saved, size, arrays, tmp_path
):
    path = tmp_path / "c"
    run_counted(
        saved,
        lambda comm: mpickpt.save_sharded(
            state_of(comm.rank, saved, arrays), path, step=0, comm=comm
        ),
    )

    def load(comm):
        mpickpt.load_sharded(
            tmp_path / "c", comm=comm, like={}, reshard=True, unexpected="ignore"
        )
        comm.taken()
        mpickpt.load_sharded(path, comm=comm, reshard=True)
        return comm.taken()

    found = of_all(run_counted(size, load))

    manifest_nbytes = (path / MANIFEST_NAME).stat().st_size
    # Of the merged tree only the length is not known beforehand.
    index_nbytes = mpickpt.read_manifest(path).shards[0].index[1]
    known = broadcast(1 + manifest_nbytes) + broadcast(1 + index_nbytes)
    beyond = found.bcasts - known - broadcast(0)
    tree_nbytes = FIRST_NBYTES - 9 + sum(beyond) if beyond else 0
    formula = reshard_calls(manifest_nbytes, tree_nbytes, index_nbytes, 0)
    beats = beats_beyond(found, formula)
    found = replace(found, messages=0, nbytes=0)
    assert found == reshard_calls(manifest_nbytes, tree_nbytes, index_nbytes, beats)
