import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.hyperslab import whole
from mpickpt.planning.layout import answer_for, entry_of
from mpickpt.planning.layout_wire import (
    pack_answers,
    pack_entries,
    pack_held,
    unpack_answers,
    unpack_entries,
    unpack_held,
)
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
def test_answers_and_entries_survive_the_wire(tiling, size):
    shape, boxes = tiling
    layouts = [
        resolve(*(sharded(shape, *boxes[rank:]) for rank in range(size))),
        resolve(*[of_kind("replicated_plain")] * size),
        resolve_array(KEY, [(r * r, of_kind("per_rank", "int8")) for r in range(size)]),
    ]
    answers = [answer_for(layout, 0) for layout in layouts]
    entries = [entry_of(layout) for layout in layouts]

    assert unpack_answers(pack_answers(answers)) == answers
    assert unpack_entries(pack_entries(entries)) == entries
