import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.hyperslab import whole
from mpickpt.planning import tiling as tiling_module
from mpickpt.planning.tiling import first_wrong_index
from tests.unit.layouts import box, coverage, tilings


@given(tilings(), st.data())
def test_first_wrong_index_is_that_of_a_brute_force_count(tiling, data):
    shape, boxes = tiling
    boxes = [one for one in boxes if not one.is_empty]
    extra = data.draw(st.lists(st.sampled_from(boxes), max_size=2))
    tiles = [one for one in boxes if data.draw(st.booleans())] + extra
    wrong = np.argwhere(coverage(shape, tiles) != 1)

    found = first_wrong_index(whole(shape), tiles)

    if len(wrong) == 0:
        assert found is None
    else:
        index = tuple(wrong[0].tolist())
        assert found == (index, coverage(shape, tiles)[index] - 1)


def test_first_wrong_index_is_in_the_space_of_the_room():
    room = box((5, 9), (7, 9))

    assert first_wrong_index(room, [box((5, 9), (7, 8))]) == ((5, 8), -1)
    assert first_wrong_index(room, [room]) is None


@given(tilings(), st.data())
def test_room_that_is_cut_up_gives_the_same_verdict_as_corners(tiling, data):
    shape, boxes = tiling
    boxes = [one for one in boxes if not one.is_empty]
    tiles = [one for one in boxes if data.draw(st.booleans())]
    tiles += data.draw(st.lists(st.sampled_from(boxes), max_size=2))
    excess = coverage(shape, tiles) - 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling_module, "_MOST_NUMBERS", 0)
        patch.setattr(tiling_module, "_MOST_GROWTH", 0)
        found = first_wrong_index(whole(shape), tiles)

    assert (found is None) == (not excess.any())
    assert found is None or np.sign(excess[found[0]]) == np.sign(found[1])


def test_boxes_apart_along_40_axes_take_little_memory():
    axes = 40
    room = box(*[(0, 2)] * axes)
    corners = [box(*[(i, i + 1)] * axes) for i in range(2)]

    index, excess = first_wrong_index(room, corners)

    assert excess == -1
    assert set(index) == {0, 1}
