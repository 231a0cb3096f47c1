import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.errors import LayoutError
from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.planning.layout import HeldArray, entry_of
from mpickpt.planning.resolve import resolve_array
from tests.unit.layouts import (
    KEY,
    block,
    box,
    coverage,
    of_kind,
    replicated,
    resolve,
    sharded,
    tilings,
)


def refused(*held):
    with pytest.raises(LayoutError) as caught:
        resolve(*held)
    assert caught.value.key == KEY
    assert repr(KEY) in str(caught.value)
    return caught.value


def test_resolve_places_blocks_one_after_another_in_rank_order():
    held = [(2, block(1, 4)), (0, block(3, 4)), (1, block(0, 4))]

    layout = resolve_array(KEY, held)

    assert layout.global_shape == (4, 4)
    assert [layout.boxes_of(rank)[0][0] for rank in range(3)] == [
        box((0, 3), (0, 4)),
        box((3, 3), (0, 4)),
        box((3, 4), (0, 4)),
    ]


def test_resolve_counts_blocks_beyond_int64_products():
    layout = resolve(block(2**61, 2**40), block(2**61, 2**40))

    assert layout.global_shape == (2**62, 2**40)


@pytest.mark.parametrize(
    "held",
    [
        sharded(None),
        sharded(None, box((0, 1)), box((0, 1))),
        sharded(None, whole(())),
    ],
)
def test_resolve_refuses_blocks_when_not_one_box_with_an_axis(held):
    error = refused(block(2), held)

    assert error.ranks == [1]


def test_resolve_refuses_blocks_when_shapes_differ_beyond_axis_0():
    error = refused(block(2, 3), block(2, 3), block(2, 4))

    assert error.ranks == [0, 2]
    assert "(3,)" in str(error)
    assert "(4,)" in str(error)


def test_resolve_refuses_a_mix_of_blocks_and_explicit_boxes():
    error = refused(block(2), sharded((4,), box((2, 4))))

    assert error.ranks == [0, 1]
    assert "consecutive blocks" in str(error)


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        (replicated((2,)), sharded((2,), box((0, 2))), ["'replicated'", "'sharded'"]),
        (block(2), block(2, dtype="int8"), ["'float32'", "'int8'"]),
        (replicated((2,)), replicated((3,)), ["(2,)", "(3,)"]),
    ],
)
def test_resolve_refuses_what_differs_and_names_both_ranks(first, second, texts):
    error = refused(first, first, second)

    assert error.ranks == [0, 2]
    assert all(text in str(error) for text in texts)


def test_resolve_takes_the_dtype_of_ranks_that_have_a_piece():
    layout = resolve(sharded((3,), dtype=None), sharded((3,), box((0, 3))))

    assert layout.dtype == "float32"
    assert layout.boxes_of(0) == ()


def test_resolve_finds_a_gap_when_nobody_has_a_piece():
    error = refused(sharded((3,), dtype=None), sharded((3,), dtype=None))

    assert "index (0,)" in str(error)


def test_resolve_asks_for_a_dtype_when_an_empty_array_has_no_pieces():
    error = refused(sharded((0, 3), dtype=None))

    assert "dtype=" in str(error)


def test_resolve_refuses_an_unknown_dtype_of_replicas():
    refused(replicated((2,), "float1024"), replicated((2,), "float1024"))


@given(tilings(), st.randoms(use_true_random=False))
def test_resolve_accepts_any_tiling_with_replicas(tiling, random):
    shape, boxes = tiling
    claims = boxes + random.choices(boxes, k=len(boxes) // 2)
    random.shuffle(claims)
    held = [sharded(shape, *claims[rank::3]) for rank in range(3)]

    layout = resolve(*held)

    for rank, one in enumerate(held):
        assert tuple(own for own, _ in layout.boxes_of(rank)) == one.boxes
    parts = [part for _, part in entry_of(layout).parts]
    assert (coverage(shape, parts) == 1).all()


def test_resolve_names_key_and_first_missing_index_of_a_gap():
    error = refused(
        sharded((4, 4), box((0, 2), (0, 4))),
        sharded((4, 4), box((2, 4), (0, 1)), box((2, 4), (3, 4))),
    )

    assert "index (2, 1)" in str(error)


def test_resolve_names_key_index_and_ranks_of_an_overlap():
    error = refused(
        sharded((10,), box((0, 6))),
        sharded((10,), box((5, 10))),
        sharded((10,), box((0, 6))),
    )

    assert error.ranks == [0, 1, 2]
    assert "index (5,)" in str(error)
    assert "rank 0 (offset (0,), shape (6,))" in str(error)
    assert "rank 1 (offset (5,), shape (5,))" in str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        box((2, 5)),
        box((-1, 2)),
        Hyperslab((3,), (-1,)),
        Hyperslab((2**63 - 1,), (2**63 - 1,)),
        Hyperslab((2**70,), (1,)),
        box((0, 4), (0, 1)),
        whole(()),
    ],
)
def test_resolve_refuses_a_box_outside_the_array(wrong):
    error = refused(sharded((4,), box((0, 4))), sharded((4,), wrong))

    assert error.ranks == [1]
    assert str(wrong.offset) in str(error)


@pytest.mark.parametrize("shape", [(2**63,), (-1,)])
def test_resolve_refuses_an_impossible_global_shape(shape):
    error = refused(sharded(shape, whole(shape)))

    assert str(shape) in str(error)


def test_resolve_tiles_huge_shapes_exactly():
    half = 2**61
    shape = (2**62, 2**62)
    lower, upper = (0, half), (half, 2**62)
    quarters = [box(*pair) for pair in itertools.product((lower, upper), repeat=2)]

    layout = resolve(*(sharded(shape, one) for one in quarters))
    error = refused(*(sharded(shape, one) for one in quarters[:3]))

    assert len(layout.boxes) == 4
    assert f"index {(half, half)}" in str(error)


def test_resolve_lets_a_rank_hold_one_box_twice():
    layout = resolve(sharded((2,), box((0, 2)), box((0, 2))))

    assert len(layout.boxes_of(0)) == 2
    assert entry_of(layout).parts == ((0, box((0, 2))),)


def test_resolve_refuses_a_replica_that_is_not_whole():
    partial = HeldArray(
        key=KEY,
        kind="replicated",
        dtype="float32",
        global_shape=(4,),
        boxes=(box((0, 2)),),
    )

    assert refused(replicated((4,)), partial).ranks == [1]


def test_per_rank_arrays_may_differ():
    held = [
        (1, of_kind("per_rank", "int8", (box((0, 2)),))),
        (3, of_kind("per_rank", "float64", (whole((4, 4)),))),
    ]

    entry = entry_of(resolve_array(KEY, held))

    assert (entry.dtype, entry.global_shape, entry.parts) == ("int8", None, ())
    assert entry.holders == range(1, 4, 2)


def test_plain_value_is_written_by_one_of_its_holders():
    layout = resolve(*[of_kind("replicated_plain")] * 3)

    ((writer, part),) = entry_of(layout).parts

    assert part == whole(())
    assert layout.boxes_of(writer)[0][1].part_of(part, writer) == part
