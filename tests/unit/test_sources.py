"""From where each file comes, and who reads which shard, as pure decisions."""

import pytest

from mpickpt.planning.load_plan import assign_shards
from mpickpt.planning.node_map import NodeMap
from mpickpt.planning.rank_loads import RankLoads
from mpickpt.planning.sources import (
    Passage,
    Plan,
    Whereabouts,
    plan_passages,
    ranks_by_node,
    sources_said,
    unmet,
)

# Ranks 0 and 1 are on node a, 2 and 3 on b, 4 on c.
NODES = NodeMap(names=("a", "b", "c"), node_of=(0, 0, 1, 1, 2))


def where_of(*nodes, tiers=None):
    return Whereabouts(
        nodes=[set(one) for one in nodes],
        tiers=[list(one) for one in tiers or [[]] * len(nodes)],
    )


def plan(needs, where, nbytes=None):
    return plan_passages(needs, where, NODES, nbytes or [10] * len(where.nodes))


def test_what_lies_at_home_goes_nowhere():
    where = where_of({0}, {1, 2})

    assert plan([(0, 1), (1, 4)], where) == Plan(passages=(), nowhere=())


@pytest.mark.parametrize(
    ("nodes", "tiers", "expected"),
    [
        ({1}, [], Passage(file=0, dest=0, sender=2)),
        ({1}, [0], Passage(file=0, dest=0, sender=2)),
        ({2}, [1], Passage(file=0, dest=0, sender=4)),
        ((), [1, 2], Passage(file=0, dest=0, tier=1)),
    ],
)
def test_nearest_source_is_chosen(nodes, tiers, expected):
    assert plan([(0, 0)], where_of(nodes, tiers=[tiers])).passages == (expected,)


def test_file_that_is_nowhere_is_told():
    where = where_of((), {1}, ())

    found = plan([(0, 0), (1, 0), (2, 4)], where)

    assert found.nowhere == (0, 2)
    assert [one.file for one in found.passages] == [1]


def test_node_gets_a_file_once():
    where = where_of({1})

    assert unmet([(0, 0), (0, 1), (0, 4), (0, 2)], where, NODES) == [(0, 0), (0, 4)]


def test_ranks_send_about_as_much():
    where = where_of({1}, {1}, {1, 2}, {1})

    found = plan([(file, 0) for file in range(4)], where, [40, 20, 20, 10])

    senders = {one.file: one.sender for one in found.passages}
    assert senders == {0: 2, 1: 3, 2: 4, 3: 3}


def test_struck_places_are_not_asked_again():
    where = where_of({1, 2}, tiers=[[0]])
    order = []
    for _ in range(3):
        (passage,) = plan([(0, 0)], where).passages
        order.append((passage.sender, passage.tier))
        node = None if passage.sender is None else NODES.node_of[passage.sender]
        where.strike(0, "damaged", node=node, tier=passage.tier)

    assert order == [(2, None), (4, None), (None, 0)]
    assert plan([(0, 0)], where).nowhere == (0,)
    assert where.struck == {0: ["damaged"] * 3}


def test_same_world_reads_its_own_shards_wherever_they_are():
    assert assign_shards([1, 1], 2, holders=[{1}, {0}], node_of=[0, 1]) == [0, 1]


def test_shards_are_read_where_they_are():
    readers = assign_shards(
        [5, 5, 5, 5], 2, holders=[{1}, {1}, {0}, {0}], node_of=[0, 1]
    )

    assert readers == [1, 1, 0, 0]


def test_shards_that_two_nodes_have_even_out():
    holders = [{0, 1}, {0, 1}, {0}, {0}]

    readers = assign_shards([5] * 4, 2, holders=holders, node_of=[0, 1])

    assert readers == [1, 1, 0, 0]


def test_shards_that_no_node_has_go_to_who_has_least():
    readers = assign_shards(
        [9, 3, 3, 3, 3], 3, holders=[{1}, (), (), (), ()], node_of=[0, 1, 1]
    )

    assert readers[0] == 1
    assert sorted(readers[1:]) == [0, 0, 2, 2]


def test_lightest_rank_is_the_lowest_of_equals():
    loads = RankLoads([0, 1, 1])
    loads.add(0, 5)
    loads.add(1, 1)

    assert loads.lightest([1]) == 2
    assert loads.lightest([0]) == 0
    assert loads.lightest([]) == 2
    loads.add(2, 9)
    assert loads.lightest([0, 1]) == 1


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        ([], "3 shards from the nodes that read them"),
        (
            [Passage(file=1, dest=2, sender=0)],
            "2 shards from the nodes that read them, 1 from node a",
        ),
        (
            [
                Passage(file=0, dest=0, tier=0),
                Passage(file=1, dest=2, tier=0),
                Passage(file=2, dest=4, tier=0),
            ],
            "3 shards from s3://b/run",
        ),
        (
            [Passage(file=0, dest=0, sender=2), Passage(file=0, dest=0, tier=0)],
            "2 shards from the nodes that read them, 1 from s3://b/run",
        ),
    ],
)
def test_sources_are_said(moved, expected):
    needs = [(0, 0), (1, 2), (2, 4)]

    assert sources_said(needs, moved, NODES, ["s3://b/run"]) == expected


def test_ranks_by_node_tell_what_is_at_home():
    read, kept = ranks_by_node(where_of({0, 1}, {1}, ()), NODES, [0, 2, 4])

    assert read == {"a": [0], "b": [1], "c": []}
    assert kept == {"a": [], "b": [0], "c": []}
