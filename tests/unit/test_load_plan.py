import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.corners import corner_arrays
from mpickpt.format.hyperslab import Hyperslab, even_block, whole
from mpickpt.planning import load_plan
from mpickpt.planning.load_plan import (
    assign_shards,
    plan_transfers,
    transfers_between,
    uncovered,
)


@st.composite
def grids(draw, shape):
    """Draw the boxes of a grid with uneven cuts, some of them empty."""
    ranges = []
    for extent in shape:
        inner = draw(st.lists(st.integers(0, extent), max_size=3))
        cuts = [0, *sorted(inner), extent]
        ranges.append(list(itertools.pairwise(cuts)))
    return [_box(cell) for cell in itertools.product(*ranges)]


@st.composite
def bricks(draw, shape):
    """Draw rows of boxes, each row cut in another way along the next axis."""
    if len(shape) < 2:
        return draw(grids(shape))
    boxes = []
    for row in draw(grids(shape[:1])):
        for inner in draw(grids(shape[1:])):
            boxes.append(Hyperslab(row.offset + inner.offset, row.shape + inner.shape))
    return boxes


@st.composite
def pieces(draw, shape):
    """Draw the boxes of repeated cuts, in any order."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 8)) if shape else 0):
        chosen = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, chosen.shape[axis]))
        ranges = list(zip(chosen.offset, chosen.stop, strict=True))
        start, stop = ranges[axis]
        for part in ((start, start + cut), (start + cut, stop)):
            boxes.append(_box([*ranges[:axis], part, *ranges[axis + 1 :]]))
    return draw(st.permutations(boxes))


def _box(ranges):
    return Hyperslab(tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))


@st.composite
def resharding(draw):
    """Draw a global shape and two decompositions of it."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    kinds = st.sampled_from([grids, bricks, pieces])
    return shape, draw(draw(kinds)(shape)), draw(draw(kinds)(shape))


def transferred(shape, stored, wanted, transfers):
    """Move the elements of an array as planned, counting arrivals."""
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    held = [values[box.slices()] for box in stored]
    filled = [np.full(box.shape, -1) for box in wanted]
    arrivals = [np.zeros(box.shape, dtype=int) for box in wanted]
    for i, j, box in transfers:
        target = box.relative_to(wanted[j]).slices()
        filled[j][target] = held[i][box.relative_to(stored[i]).slices()]
        arrivals[j][target] += 1
    return values, filled, arrivals


def gap(wanted, stored):
    """Return the first index that is wanted and not stored."""
    if not wanted:
        return None
    if not stored:
        return next((box.offset for box in wanted if not box.is_empty), None)
    need = corner_arrays(wanted)
    return uncovered(need, transfers_between(corner_arrays(stored), need))


@given(resharding())
def test_plan_transfers_each_element_exactly_once(case):
    shape, stored, wanted = case

    transfers = plan_transfers(stored, wanted)

    values, filled, arrivals = transferred(shape, stored, wanted, transfers)
    for box, part, count in zip(wanted, filled, arrivals, strict=True):
        assert (count == 1).all()
        assert (part == values[box.slices()]).all()
    assert gap(wanted, stored) is None


@given(resharding(), st.data())
def test_plan_fills_wanted_boxes_that_overlap(case, data):
    shape, stored, boxes = case
    wanted = data.draw(st.lists(st.sampled_from([*boxes, whole(shape)]), max_size=5))

    transfers = plan_transfers(stored, wanted)

    _, _, arrivals = transferred(shape, stored, wanted, transfers)
    assert all((count == 1).all() for count in arrivals)


@given(resharding(), st.data())
def test_uncovered_finds_the_first_gap_when_boxes_are_missing(case, data):
    shape, stored, wanted = case
    stored = [box for box in stored if data.draw(st.booleans())]
    there = np.zeros(shape, dtype=bool)
    for box in stored:
        there[box.slices()] = True
    gaps = [
        tuple((index + box.offset).tolist())
        for box in wanted
        for index in np.argwhere(~there[box.slices()])
    ]

    found = gap(wanted, stored)

    assert found == (gaps[0] if gaps else None)


@given(resharding())
def test_plan_is_the_same_when_candidates_come_in_small_chunks(case):
    _, stored, wanted = case
    expected = plan_transfers(stored, wanted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "_MAX_PAIRS", 2)
        transfers = plan_transfers(stored, wanted)

    assert transfers == expected


def test_plan_lists_transfers_by_stored_then_wanted_box():
    stored = [Hyperslab((4,), (4,)), Hyperslab((0,), (4,))]
    wanted = [Hyperslab((3,), (3,)), Hyperslab((0,), (5,))]

    transfers = plan_transfers(stored, wanted)

    assert transfers == [
        (0, 0, Hyperslab((4,), (2,))),
        (0, 1, Hyperslab((4,), (1,))),
        (1, 0, Hyperslab((3,), (1,))),
        (1, 1, Hyperslab((0,), (4,))),
    ]


def test_plan_of_an_array_without_axes_goes_to_all():
    transfers = plan_transfers([whole(())], [whole(())] * 2)

    assert transfers == [(0, 0, whole(())), (0, 1, whole(()))]
    assert gap([whole(())], [whole(())]) is None


@pytest.mark.parametrize(
    ("stored", "wanted"), [([], [whole((2,))]), ([whole((2,))], [])]
)
def test_plan_is_empty_when_one_side_is(stored, wanted):
    assert plan_transfers(stored, wanted) == []


def test_plan_is_exact_when_extents_are_huge():
    shape = (2**31, 2**31)
    stored = [even_block(shape, i, 2) for i in range(2)]
    wanted = [even_block(shape, i, 3) for i in range(3)]

    transfers = plan_transfers(stored, wanted)

    assert len(transfers) == 4
    assert gap(wanted, stored) is None
    assert gap(wanted, stored[:1]) == (2**30, 0)


def test_same_world_reads_its_own_shards():
    assert assign_shards([5, 1, 9], 3) == [0, 1, 2]


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 12))
def test_assigned_shards_are_balanced_by_bytes(nbytes, size):
    readers = assign_shards(nbytes, size)

    loads = [0] * size
    for shard, reader in enumerate(readers):
        loads[reader] += nbytes[shard]
    if len(nbytes) != size:
        assert max(loads) - min(loads) <= max(nbytes, default=0)
