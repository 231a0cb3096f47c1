import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.hyperslab import whole
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
