import sys
from itertools import product

import numpy as np
import pytest

from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.format.manifest import dump_manifest, parse_manifest
from mpickpt.planning import load_plan
from mpickpt.planning.box_index import BoxIndex
from mpickpt.planning.layout import HeldArray
from mpickpt.planning.load_plan import assign_shards
from mpickpt.planning.matching import answered
from mpickpt.planning.tiling import first_wrong_index
from tests.benchmarks.messages import new_layout
from tests.benchmarks.scale import log_log_fit
from tests.benchmarks.simulation import (
    agree_on_layout,
    announced,
    grid_box,
    held_by,
    key_of_array,
    manifest_of,
    planned,
    row_box,
    shape_of,
    stored_by_reader,
    wanted_by_rank,
)

RANKS = (64, 128, 256)
NEARLY_LINEAR = 1.15


def operations(call):
    """Return how many lines of the library run in a call, and pairs that are compared.

    Lines count loops as well as calls; what numpy does in one line is linear in the
    boxes, but for the pairs of boxes that are looked at together, which are counted.
    """
    counted = 0
    intersections = load_plan._intersections

    def trace(frame, event, _argument):
        nonlocal counted
        if "mpickpt" not in frame.f_code.co_filename:
            return None
        counted += event == "line"
        return trace

    def counting(have, need, i, j):
        nonlocal counted
        counted += len(i)
        return intersections(have, need, i, j)

    before = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_plan, "_intersections", counting)
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
    return counted


def exponents(sizes, call):
    return log_log_fit(
        sizes, [operations(lambda size=size: call(*size)) for size in sizes]
    )


def test_layout_exchange_grows_with_ranks_times_arrays():
    sizes = [*product(RANKS, (8,)), *product((64,), (16, 32))]

    grown = exponents(
        sizes,
        lambda ranks, arrays: agree_on_layout(
            [held_by(rank, ranks, range(arrays)) for rank in range(ranks)]
        ),
    )

    assert max(grown) < NEARLY_LINEAR


@pytest.mark.parametrize("box_of", [row_box, grid_box])
def test_reshard_plan_grows_with_ranks_times_arrays(box_of):
    sizes = [*product(RANKS, (8,)), *product((64,), (16, 32))]

    def plan(ranks, arrays):
        rows, size = 16 * ranks, 3 * ranks // 4
        planned(
            stored_by_reader(ranks, size, range(arrays), rows),
            wanted_by_rank(size, range(arrays), rows, box_of),
        )

    grown = exponents(sizes, plan)

    # Rows cut into squares meet more of each other: with n ranks, n^1.5 pairs.
    assert grown[0] < (NEARLY_LINEAR if box_of is row_box else 1.6)
    assert grown[1] < NEARLY_LINEAR


def test_owner_of_one_key_works_for_that_key_alone():
    def match(ranks):
        size = 3 * ranks // 4
        mail = announced(
            stored_by_reader(ranks, size, [0], 16 * ranks),
            wanted_by_rank(size, [0], 16 * ranks),
        )
        [(_, letters)] = mail.items()
        return operations(lambda: answered(letters, size))

    [grown] = log_log_fit([[64], [128], [256]], [match(n) for n in (64, 128, 256)])

    assert grown < NEARLY_LINEAR


def test_plan_moves_every_element_once():
    saved, size, arrays = 12, 9, range(5)
    rows = 40
    stored = stored_by_reader(saved, size, arrays, rows)
    wanted = wanted_by_rank(size, arrays, rows, grid_box)

    sendings = planned(stored, wanted)

    arrived = {
        (rank, item.number): np.zeros(item.shape, dtype=int)
        for rank, items in enumerate(wanted)
        for item in items
    }
    for reader, sent in enumerate(sendings):
        for one in sent:
            source = stored[reader][one.number]
            item = next(w for w in wanted[one.dest] if w.number == one.wanted)
            assert item.key == source.key
            assert Hyperslab(source.offset, source.shape).contains(one.box)
            target = Hyperslab(item.offset, item.shape)
            arrived[one.dest, one.wanted][one.box.relative_to(target).slices()] += 1
    assert all((counts == 1).all() for counts in arrived.values())


def test_answers_of_the_layout_exchange_share_out_every_element_once():
    ranks, arrays = 12, 16
    held = [held_by(rank, ranks, range(arrays)) for rank in range(ranks)]

    answers = agree_on_layout(held)

    for array in range(arrays):
        written = np.zeros(shape_of(array, 16 * ranks), dtype=int)
        for rank, own in enumerate(answers):
            [answer] = [one for one in own if one.key == key_of_array(array)]
            for box, share in answer.boxes:
                part = share.part_of(box, rank)
                if part is not None:
                    written[part.slices()] += 1
        assert (written == 1).all()


def test_answers_stay_small_where_replicas_are_a_grid_of_ranks():
    def nbytes(data_parallel):
        # Of 8 tensor x 4 pipeline ranks, one stage holds the array.
        ranks = [d * 32 + t for d in range(data_parallel) for t in range(8)]
        one = HeldArray(
            key="w",
            kind="replicated",
            dtype="float32",
            global_shape=(4096,),
            boxes=(whole((4096,)),),
        )
        held = [[one] if r in ranks else [] for r in range(32 * data_parallel)]
        return new_layout(held, {}).nbytes

    [grown] = log_log_fit([[4], [8], [16]], [nbytes(n) for n in (4, 8, 16)])

    assert grown < NEARLY_LINEAR


@pytest.mark.parametrize("box_of", [row_box, grid_box])
def test_coverage_check_grows_with_the_boxes(box_of):
    def check(ranks):
        shape = shape_of(0, 16 * ranks)
        boxes = [box_of(shape, rank, ranks) for rank in range(ranks)]
        assert first_wrong_index(whole(shape), boxes) is None

    [grown] = exponents([[256], [512], [1024]], check)

    assert grown < NEARLY_LINEAR


def test_manifest_grows_with_the_ranks_and_stays_under_its_bound():
    def write_and_parse(ranks):
        text = dump_manifest(manifest_of(ranks, 10))
        assert parse_manifest(text, where="here").world_size == ranks

    [grown] = exponents([[256], [512], [1024]], write_and_parse)
    per_rank = len(dump_manifest(manifest_of(1024, 10))) / 1024

    assert grown < NEARLY_LINEAR
    assert 65_536 * per_rank < 20_000_000


def test_sharing_out_the_shards_grows_with_the_ranks():
    [grown] = exponents(
        [[256], [512], [1024]],
        lambda ranks: assign_shards(list(range(ranks)), 3 * ranks // 4),
    )

    assert grown < NEARLY_LINEAR


@pytest.mark.parametrize("axis", [0, 1])
def test_cutting_a_shard_for_its_receivers_grows_with_what_is_cut(axis):
    """Small boxes of one shard against all who want a part of it, along each axis."""

    def cut(receivers):
        shape = (receivers, receivers)
        wanted = [Hyperslab((i, 0), (1, receivers)) for i in range(receivers)]
        if axis:
            wanted = [Hyperslab((0, i), (receivers, 1)) for i in range(receivers)]
        index = BoxIndex(wanted)
        smalls = [Hyperslab((i, 0), (1, receivers)) for i in range(receivers)]
        if axis:
            smalls = [Hyperslab((0, i), (receivers, 1)) for i in range(receivers)]
        found = [len(list(index.meeting(small))) for small in smalls]
        assert sum(found) == receivers
        assert whole(shape).contains(wanted[-1])

    [grown] = exponents([[64], [128], [256]], cut)

    assert grown < NEARLY_LINEAR
