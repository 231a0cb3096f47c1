from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.hyperslab import whole
from mpickpt.planning.layout import Share, owner_of
from tests.unit.layouts import KEY


@given(st.integers(1, 9), st.data())
def test_part_of_agrees_with_parts(n_holders, data):
    start = data.draw(st.integers(0, n_holders - 1))
    nparts = data.draw(st.integers(1, n_holders))
    shape = data.draw(st.sampled_from([(), (0,), (2,), (7, 3)]))
    share = Share(holders=range(3, 3 + 2 * n_holders, 2), start=start, nparts=nparts)

    by_rank = {rank: part for part, rank in share.parts(whole(shape))}

    for rank in range(25):
        assert share.part_of(whole(shape), rank) == by_rank.get(rank)


def test_owner_is_spread_and_fixed():
    owners = [owner_of(f"layer{i}/w", 8) for i in range(400)]

    assert set(owners) == set(range(8))
    assert owner_of(KEY, 8) == 6
