from mpickpt.planning.layout import entry_of
from mpickpt.planning.resolve import resolve_array
from tests.unit.layouts import KEY, MIB, box, replicated, resolve, sharded


def test_small_replica_is_written_by_one_holder():
    layout = resolve(*[replicated((8,))] * 5)

    (_, share) = layout.boxes[0]

    assert share.holders == range(5)
    assert share.nparts == 1
    assert len(entry_of(layout).parts) == 1


def test_large_replica_is_written_in_parts_by_many():
    layout = resolve(*[replicated((3 * MIB,), "int8")] * 5)

    writers = [rank for rank, _ in entry_of(layout).parts]

    assert len(set(writers)) == len(writers) == 3


def test_large_replica_with_few_rows_is_cut_in_rows():
    layout = resolve(*[replicated((2, 8 * MIB), "int8")] * 5)

    assert len(entry_of(layout).parts) == 2


def test_replicas_of_equal_boxes_are_spread_over_their_holders():
    boxes = [box((i, i + 1)) for i in range(8)]
    layout = resolve(*[sharded((8,), *boxes)] * 4)

    writers = [rank for rank, _ in entry_of(layout).parts]

    assert [writers.count(rank) for rank in range(4)] == [2] * 4


def test_rank_that_writes_a_box_alone_is_spared_a_replica():
    alone, shared = box((0, 9)), box((9, 10))
    layout = resolve(sharded((10,), alone, shared), sharded((10,), shared))

    assert {part: rank for rank, part in entry_of(layout).parts}[shared] == 1


def test_irregular_holders_are_listed():
    held = [(0, replicated((2,))), (1, replicated((2,))), (5, replicated((2,)))]

    layout = resolve_array(KEY, held)

    assert layout.boxes[0][1].holders == (0, 1, 5)
