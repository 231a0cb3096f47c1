"""Which ranks share a node, and which other node keeps each shard once more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.planning.node_map import (
    NAME_NBYTES,
    NodeMap,
    map_nodes,
    pack_node_record,
)
from mpickpt.planning.partners import plan_partners

MIB = 1 << 20


def nodes_of(*counts):
    """Return nodes that have so many ranks each."""
    node_of = [node for node, count in enumerate(counts) for _ in range(count)]
    names = tuple(f"n{node}" for node in range(len(counts)))
    return NodeMap(names=names, node_of=tuple(node_of))


def incoming(plan, nbytes):
    """Return the bytes of copies on each node."""
    return [
        sum(nbytes[rank] for rank in plan.copies_on(node))
        for node in range(plan.nodes.n_nodes)
    ]


@pytest.mark.parametrize(
    ("counts", "target_of"),
    [
        ((1, 1), (1, 0)),
        ((2, 2), (2, 3, 0, 1)),
        ((1, 1, 1), (2, 0, 1)),
        ((2, 2, 2), (3, 4, 5, 0, 1, 2)),
        ((3, 1), (3, 3, 3, 1)),
        ((1, 3), (2, 0, 0, 0)),
        ((2, 1, 1), (2, 3, 0, 1)),
        ((3, 2), (3, 4, 4, 0, 2)),
        ((5, 1, 1), (5, 5, 6, 6, 6, 1, 3)),
    ],
)
def test_copies_of_equal_shards_go_to(counts, target_of):
    nodes = nodes_of(*counts)

    plan = plan_partners(nodes, [MIB] * len(nodes.node_of), copies=1)

    assert plan.target_of == target_of


def test_ranks_that_go_round_the_nodes_have_partners_elsewhere():
    nodes = NodeMap(names=("a", "b"), node_of=(0, 1, 0, 1))

    plan = plan_partners(nodes, [MIB] * 4, copies=1)

    assert plan.target_of == (1, 0, 3, 2)
    assert plan.sources_of == {1: [0], 0: [1], 3: [2], 2: [3]}
    assert plan.shards_on(0) == [0, 1, 2, 3]
    assert plan.copies_by_name() == {"a": [1, 3], "b": [0, 2]}


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=7),
    st.randoms(use_true_random=False),
)
def test_no_copy_is_on_the_node_of_its_shard(counts, random):
    nodes = nodes_of(*counts)
    order = list(nodes.node_of)
    random.shuffle(order)
    nodes = NodeMap(names=nodes.names, node_of=tuple(order))
    sizes = (0, 1, MIB, 1 << 34, random.randrange(1 << 40))
    nbytes = [random.choice(sizes) for _ in order]

    plan = plan_partners(nodes, nbytes, copies=1)

    for rank, target in enumerate(plan.target_of):
        assert nodes.node_of[rank] != nodes.node_of[target]


@given(st.lists(st.integers(1, 6), min_size=2, max_size=7))
def test_each_node_takes_about_as_much_as_it_gives(counts):
    nodes = nodes_of(*counts)
    nbytes = [MIB] * len(nodes.node_of)
    largest, others = max(counts), sum(counts) - max(counts)

    plan = plan_partners(nodes, nbytes, copies=1)

    if largest <= others:
        for got, given in zip(incoming(plan, nbytes), counts, strict=True):
            assert abs(got / MIB - given) <= 1
    else:
        assert incoming(plan, nbytes)[counts.index(largest)] == others * MIB


def test_one_node_cannot_keep_copies_of_its_own_shards():
    with pytest.raises(ValueError, match="all 3 are on n0"):
        plan_partners(nodes_of(3), [MIB] * 3, copies=1)


def test_without_copies_one_node_will_do():
    plan = plan_partners(nodes_of(3), [MIB] * 3, copies=0)

    assert plan.target_of == ()
    assert plan.shards_on(0) == [0, 1, 2]


def record(view, path, name):
    return pack_node_record(view.ljust(16, b"v"), path.ljust(16, b"p"), name)


def test_ranks_share_a_node_where_view_and_path_are_equal():
    records = [
        record(b"1", b"x", "a"),
        record(b"2", b"x", "b"),
        record(b"1", b"x", "a"),
        record(b"1", b"y", "c"),
    ]

    nodes = map_nodes(records)

    assert nodes.node_of == (0, 1, 0, 2)
    assert nodes.names == ("a", "b", "c")
    assert nodes.leaders == (0, 1, 3)
    assert nodes.ranks_by_name() == {"a": [0, 2], "b": [1], "c": [3]}
    assert nodes.leader_of(2) == 0


def test_names_that_several_nodes_share_are_numbered():
    names = ["a", "a-2", "a", "a", "b"]

    nodes = map_nodes([record(bytes([n]), b"", name) for n, name in enumerate(names)])

    assert nodes.names == ("a", "a-2", "a-3", "a-4", "b")


def test_records_are_of_one_length_whatever_the_name():
    records = [record(b"1", b"", "n"), record(b"2", b"", "\N{SNOWMAN}" * 99)]

    nodes = map_nodes(records)

    assert len({len(one) for one in records}) == 1
    assert len(nodes.names[1].encode()) <= NAME_NBYTES
