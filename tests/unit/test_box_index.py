from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.hyperslab import Hyperslab
from mpickpt.planning.box_index import BoxIndex


@st.composite
def boxes_and_one(draw):
    ndim = draw(st.integers(0, 3))
    numbers = st.tuples(*[st.integers(0, 5)] * ndim)
    boxes = st.builds(Hyperslab, numbers, numbers)
    return draw(st.lists(boxes, max_size=8)), draw(boxes)


@given(boxes_and_one())
def test_index_finds_what_a_look_at_every_box_finds(case):
    boxes, one = case

    found = dict(BoxIndex(boxes).meeting(one))

    expected = {i: both for i, box in enumerate(boxes) if (both := box.intersect(one))}
    assert found == expected
