import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.hyperslab import whole
from mpickpt.planning.layout import answer_for
from mpickpt.planning.layout_wire import (
    pack_answers,
    pack_held,
    unpack_answers,
    unpack_held,
)
from mpickpt.planning.rank_grid import holders_of, place_of
from mpickpt.planning.resolve import resolve_array
from tests.unit.layouts import (
    KEY,
    block,
    box,
    of_kind,
    replicated,
    resolve,
    sharded,
    tilings,
)


def test_descriptions_survive_the_wire():
    held = [
        block(5),
        block(5, 2),
        replicated((3, 4)),
        replicated(()),
        replicated((3,), held=False),
        sharded((9,), box((0, 2)), box((4, 9)), box((3, 3))),
        sharded((9,), whole(())),
        sharded(None, whole(())),
        sharded((2**62, 2**62), whole((2**62, 2**62)), dtype=None),
        of_kind("per_rank", "int8", (box((0, 2)),)),
        of_kind("replicated_plain"),
    ]

    assert unpack_held(pack_held(held)) == held


@pytest.mark.parametrize("held", [block(1000), replicated((4096, 4096))])
def test_common_descriptions_are_compact(held):
    few, many = (pack_held([held] * n) for n in (1, 101))

    assert len(many) - len(few) <= 100 * (len(KEY) + len("float32") + 24)


@given(tilings(), st.integers(1, 5))
def test_answers_survive_the_wire(tiling, size):
    shape, boxes = tiling
    layouts = [
        resolve(*(sharded(shape, *boxes[rank:]) for rank in range(size))),
        resolve(*[of_kind("replicated_plain")] * size),
        resolve_array(KEY, [(r * r, of_kind("per_rank", "int8")) for r in range(size)]),
    ]
    answers = [answer_for(layout, 0) for layout in layouts]

    assert unpack_answers(pack_answers(answers)) == answers


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9))))
def test_holders_on_a_grid_are_a_few_numbers(start, axes):
    ranks, span = [start], 1
    for count, room in axes[:4]:
        stride = span + room - 1
        ranks = [rank + i * stride for i in range(count) for rank in ranks]
        span = ranks[-1] - start + 1

    holders = holders_of(ranks)

    assert list(holders) == ranks
    assert not isinstance(holders, tuple)
    assert [place_of(holders, rank) for rank in range(start, start + span)] == [
        ranks.index(rank) if rank in ranks else None
        for rank in range(start, start + span)
    ]
    assert place_of(holders, start - 1) is None
    assert place_of(holders, start + span) is None


@given(st.sets(st.integers(0, 99), min_size=1))
def test_holders_of_any_ranks_know_their_places(ranks):
    ordered = sorted(ranks)

    holders = holders_of(ordered)

    assert [holders[i] for i in range(len(holders))] == ordered
    assert [place_of(holders, r) for r in range(101)] == [
        ordered.index(r) if r in ranks else None for r in range(101)
    ]


def test_answers_do_not_grow_with_the_holders_on_a_grid():
    few, many = (
        resolve_array(
            KEY,
            [
                (data * 64 + tensor, replicated((4096,)))
                for data in range(n)
                for tensor in range(8)
            ],
        )
        for n in (4, 64)
    )

    lengths = [len(pack_answers([answer_for(one, 0)])) for one in (few, many)]

    assert lengths[1] - lengths[0] <= 8
    assert unpack_answers(pack_answers([answer_for(many, 0)])) == [answer_for(many, 0)]
