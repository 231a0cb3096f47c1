"""Ranges of flat elements as boxes, and checksums of parts, over many shapes."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.interop.deepspeed.flat import (
    even_fragments,
    part_fragments,
    parts_numel,
)
from mpickpt.interop.sources.crc_of_parts import CrcOfParts, join_crc32
from mpickpt.interop.sources.flat_range import boxes_of_flat_range

SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    first, last = sorted(draw(st.integers(0, math.prod(shape))) for _ in range(2))
    return shape, first, last


@given(ranges())
def test_boxes_hold_the_range_in_order(case):
    shape, first, last = case
    whole = np.arange(math.prod(shape)).reshape(shape)

    boxes = boxes_of_flat_range(shape, first, last)

    held = [whole[box.slices()].ravel() for box, _ in boxes]
    assert [int(part[0]) for part in held] == [start for _, start in boxes]
    assert np.concatenate([[], *held]).tolist() == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("case", [((2, 3), -1, 2), ((2, 3), 4, 7), ((), 0, 2)])
def test_boxes_are_refused_when_the_range_leaves_the_array(case):
    with pytest.raises(ValueError, match="not inside"):
        boxes_of_flat_range(*case)


def test_boxes_of_nothing_are_none():
    assert boxes_of_flat_range((0, 5), 0, 0) == []
    assert boxes_of_flat_range((4, 5), 7, 7) == []


GROUPS = st.lists(SHAPES, min_size=1, max_size=5)


@given(GROUPS, st.integers(1, 5), st.data())
def test_even_fragments_rebuild_every_parameter(shapes, count, data):
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    paddings = [data.draw(st.integers(0, 3)) for _ in shapes]
    total = sum(map(math.prod, shapes)) + sum(paddings)
    partition = -(-total // (2 * count)) * 2
    flat, values, at = np.full(partition * count, -1), {}, 0
    for number, (name, padding) in enumerate(zip(named, paddings, strict=True)):
        numel = math.prod(named[name])
        values[name] = 1000 * number + np.arange(numel)
        flat[at : at + numel] = values[name]
        at += numel + padding

    rebuilt = {name: np.full(len(value), -2) for name, value in values.items()}
    for rank in range(count):
        own = flat[rank * partition : (rank + 1) * partition]
        for part in even_fragments(0, named, paddings, partition, rank):
            place = slice(part.start, part.start + part.length)
            rebuilt[part.name][place] = own[part.local_start :][: part.length]

    assert all(np.array_equal(rebuilt[name], values[name]) for name in values)


@given(GROUPS, st.integers(1, 5), st.data())
def test_part_fragments_rebuild_every_parameter(shapes, count, data):
    named = {f"p{i}": shape for i, shape in enumerate(shapes)}
    cut = data.draw(st.integers(0, len(shapes)))
    items = list(named.items())
    groups = [dict(items[:cut]), dict(items[cut:])]
    total = parts_numel(groups, count)
    middle = data.draw(st.integers(0, total))  # not where the groups meet
    values = {n: 1000 * i + np.arange(math.prod(s)) for i, (n, s) in enumerate(items)}

    rebuilt = {name: np.full(len(value), -2) for name, value in values.items()}
    for rank in range(count):
        flat = np.concatenate([part_of(v, rank, count) for v in values.values()])
        assert len(flat) == total
        vectors = flat[:middle], flat[middle:]
        lengths = [middle, total - middle]
        for part in part_fragments(groups, lengths, count, rank):
            own = vectors[part.group][part.local_start :][: part.length]
            rebuilt[part.name][part.start : part.start + part.length] = own

    assert all(np.array_equal(rebuilt[name], values[name]) for name in values)


def part_of(value, rank, count):
    """Return a rank's part of a parameter as ZeRO 3 has it, padded with zeros."""
    length = -(-len(value) // count)
    own = value[rank * length : (rank + 1) * length]
    return np.pad(own, (0, length - len(own)))


@given(st.binary(), st.binary())
def test_checksums_are_joined_as_of_one_run(first, second):
    joined = join_crc32(zlib.crc32(first), zlib.crc32(second), len(second))

    assert joined == zlib.crc32(first + second)


@given(
    st.binary(min_size=1, max_size=300),
    st.lists(st.tuples(st.integers(0, 299), st.integers(0, 60)), max_size=30),
)
def test_checksum_of_parts_is_that_of_the_whole(content, reads):
    parts = CrcOfParts()
    for start, length in reads:
        parts.add(min(start, len(content)), memoryview(content)[start : start + length])
    seen = {i for start, length in reads for i in range(start, start + length)}
    assert parts.nbytes == len(seen & set(range(len(content))))

    for start, stop in parts.gaps(0, len(content)):
        parts.add(start, memoryview(content)[start:stop])

    assert parts.total() == zlib.crc32(content)
