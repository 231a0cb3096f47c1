"""The boxes of a DTensor: what torch itself puts on each rank of a mesh."""

import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from mpickpt import StateTypeError  # noqa: E402
from mpickpt.interop.torch.dtensor import boxes_of, placed_boxes  # noqa: E402


@st.composite
def distributions(draw):
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    split = st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 4))
    splits = tuple(draw(st.none() | split) for _ in mesh)
    return shape, mesh, splits


def local_by_torch(whole, mesh, coordinate, splits):
    """Split as torch does, one dimension of the mesh after the other."""
    local = whole
    for count, index, split in zip(mesh, coordinate, splits, strict=True):
        if split is None:
            continue
        dim, factor = split
        placement = _StridedShard(dim, split_factor=factor) if factor > 1 else None
        placement = placement or Shard(dim)
        parts, _ = placement._split_tensor(
            local, count, with_padding=False, contiguous=False
        )
        local = parts[index]
    return local


@given(distributions())
def test_boxes_are_those_that_torch_gives_each_rank(distribution):
    shape, mesh, splits = distribution
    whole = torch.arange(math.prod(shape)).reshape(shape)

    for coordinate in itertools.product(*map(range, mesh)):
        wanted = local_by_torch(whole, mesh, coordinate, splits)
        got = torch.full(wanted.shape, -1)
        for there, here in placed_boxes(shape, mesh, coordinate, splits):
            got[here.slices()] = whole[there.slices()]
        assert torch.equal(got, wanted)


@given(distributions())
def test_boxes_of_all_ranks_tile_the_tensor(distribution):
    shape, mesh, splits = distribution
    split_axes = [n for n, split in zip(mesh, splits, strict=True) if split is None]
    count = torch.zeros(shape, dtype=torch.int64)

    for coordinate in itertools.product(*map(range, mesh)):
        for there, _ in placed_boxes(shape, mesh, coordinate, splits):
            count[there.slices()] += 1

    assert (count == math.prod(split_axes)).all()


def test_spans_that_follow_each_other_are_one_box():
    whole = placed_boxes((8, 3), (1,), (0,), ((0, 4),))

    assert [(there.offset, there.shape) for there, _ in whole] == [((0, 0), (8, 3))]


def dtensor_of(shape, local, placements, coordinate=(0,), mesh=(2,)):
    return SimpleNamespace(
        shape=shape,
        placements=placements,
        device_mesh=SimpleNamespace(shape=mesh, get_coordinate=lambda: coordinate),
        to_local=lambda: local,
    )


def test_partial_sums_are_refused_by_name():
    local = torch.ones(4)

    with pytest.raises(StateTypeError, match=r"'w' has the placement .*sum"):
        boxes_of(dtensor_of((4,), local, [Partial()]), local, "w")


@pytest.mark.parametrize("shape", [(3,), (1, 2), (0,)])
def test_local_tensor_of_other_size_is_refused(shape):
    local = torch.ones(shape)

    with pytest.raises(StateTypeError, match="from_local"):
        boxes_of(dtensor_of((4,), local, [Shard(0)]), local, "w")


def test_rank_outside_the_mesh_holds_nothing():
    local = torch.empty(0)

    assert boxes_of(dtensor_of((4,), local, [Replicate()], None), local, "w") == ()
