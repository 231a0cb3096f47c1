"""Box arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.hyperslab import (
    Hyperslab,
    contiguous_pieces,
    even_block,
    split_rows,
    whole,
)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw, ndim):
    axis = st.tuples(st.integers(0, 6), st.integers(0, 4))
    axes = draw(st.lists(axis, min_size=ndim, max_size=ndim))
    return Hyperslab(tuple(o for o, _ in axes), tuple(n for _, n in axes))


def covered(pieces, shape):
    count = np.zeros(shape, int)
    for piece in pieces:
        count[piece.slices()] += 1
    return count


def test_hyperslab_knows_its_extent():
    box = Hyperslab((2, 0), (3, 4))

    assert (box.ndim, box.size, box.stop, box.is_empty) == (2, 12, (5, 4), False)
    assert box.slices() == (slice(2, 5), slice(0, 4))


def test_hyperslab_without_axes_holds_one_element():
    box = whole(())

    assert (box.ndim, box.size, box.is_empty) == (0, 1, False)
    assert box.intersect(box) == box
    assert box.contains(box)


@given(st.integers(0, 3).flatmap(lambda d: st.tuples(boxes(d), boxes(d))))
def test_intersect_selects_what_both_select(pair):
    one, other = pair
    grid = np.zeros((11,) * one.ndim, int)
    grid[one.slices()] += 1
    grid[other.slices()] += 1

    both = one.intersect(other)

    assert (grid == 2).sum() == (both.size if both else 0)
    assert both is None or (grid[both.slices()] == 2).all()
    assert both == other.intersect(one)


@given(st.integers(0, 3).flatmap(lambda d: st.tuples(boxes(d), boxes(d))))
def test_contains_agrees_with_intersect_when_the_box_is_not_empty(pair):
    outer, inner = pair

    if not inner.is_empty:
        assert outer.contains(inner) == (outer.intersect(inner) == inner)


def test_relative_to_shifts_into_the_frame_of_the_other():
    box = Hyperslab((5, 7), (2, 2))

    assert box.relative_to(Hyperslab((4, 7), (9, 9))) == Hyperslab((1, 0), (2, 2))


def test_boxes_of_different_ndim_are_refused():
    with pytest.raises(ValueError):
        whole((2, 2)).intersect(whole((2,)))


@given(SHAPES.filter(bool), st.integers(1, 7))
def test_even_blocks_tile_the_array_longer_ones_first(shape, count):
    blocks = [even_block(shape, index, count) for index in range(count)]

    rows = [block.shape[0] for block in blocks]
    assert (covered(blocks, shape) == 1).all()
    assert rows == sorted(rows, reverse=True)
    assert rows[0] - rows[-1] <= 1


def test_even_block_gives_an_array_without_axes_to_the_first():
    assert [even_block((), index, 3) for index in range(3)] == [whole(()), None, None]


def test_even_block_is_empty_when_there_are_no_rows():
    assert even_block((0, 4), 1, 2) == Hyperslab((0, 0), (0, 4))


@given(st.integers(0, 3).flatmap(boxes), st.integers(1, 6))
def test_split_rows_tiles_the_box_with_non_empty_parts(box, count):
    parts = split_rows(box, count)

    grid = covered(parts, (11,) * box.ndim)
    assert (grid[box.slices()] == 1).all()
    assert grid.sum() == box.size
    assert len(parts) <= count
    assert not any(part.is_empty for part in parts)


@given(SHAPES, st.integers(1, 16), st.integers(1, 200))
def test_contiguous_pieces_run_through_memory_in_order(shape, itemsize, max_nbytes):
    memory = np.arange(np.prod(shape, dtype=int)).reshape(shape)

    pieces = list(contiguous_pieces(shape, itemsize, max_nbytes))

    runs = [memory[piece.slices()].reshape(-1) for piece in pieces]
    assert np.array_equal(np.concatenate([np.zeros(0, int), *runs]), memory.reshape(-1))
    assert all((np.diff(run) == 1).all() for run in runs)
    assert all(0 < piece.size <= max(1, max_nbytes // itemsize) for piece in pieces)


def test_contiguous_pieces_are_as_long_as_allowed():
    pieces = list(contiguous_pieces((10, 4), 8, 100))

    assert [piece.shape for piece in pieces] == [(3, 4)] * 3 + [(1, 4)]
