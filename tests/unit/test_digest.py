"""CRC-32 of the blocks of a shard."""

import struct
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format import digest
from mpickpt.format.digest import BlockCrc, block_at, n_blocks, shard_blocks

BLOCK = 64


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "BLOCK_NBYTES", BLOCK)
        yield


def table_of(content):
    blocks = [content[n : n + BLOCK] for n in range(0, len(content), BLOCK)]
    return struct.pack(f"<{len(blocks)}I", *map(zlib.crc32, blocks))


@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=6))
def test_block_crc_does_not_depend_on_how_it_is_fed(content, cuts):
    edges = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    crc = BlockCrc()

    for first, last in pairwise(edges):
        crc.update(content[first:last])

    assert crc.table() == table_of(content)
    assert len(crc.table()) == 4 * n_blocks(len(content))


def test_block_crc_goes_on_after_its_table_was_taken():
    crc = BlockCrc()

    crc.update(b"a" * 100)
    crc.table()
    crc.update(b"b" * 100)

    assert crc.table() == table_of(b"a" * 100 + b"b" * 100)


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_block_crc_takes_any_contiguous_view(shape):
    array = np.full(shape, 7, "<i4")
    crc = BlockCrc()

    crc.update(memoryview(array))

    assert crc.table() == table_of(array.tobytes())


@given(st.integers(0, 300), st.integers(0, 40), st.integers(0, 300))
def test_shard_blocks_cover_all_but_the_table(table_offset, table_nbytes, rest):
    nbytes = table_offset + table_nbytes + rest

    blocks = shard_blocks(table_offset, table_nbytes, nbytes)

    covered = [at for first, last in blocks for at in range(first, last)]
    table_end = table_offset + table_nbytes
    assert covered == [*range(table_offset), *range(table_end, nbytes)]
    assert len(blocks) == n_blocks(table_offset) + n_blocks(rest)
    assert all(last - first <= BLOCK for first, last in blocks)


@given(st.integers(0, 300), st.integers(0, 40), st.integers(0, 300))
def test_block_at_agrees_with_shard_blocks(table_offset, table_nbytes, rest):
    nbytes = table_offset + table_nbytes + rest
    blocks = shard_blocks(table_offset, table_nbytes, nbytes)

    found = [
        block_at(at, table_offset, table_nbytes, nbytes) for at in range(-1, nbytes + 1)
    ]

    expected = [None] * (nbytes + 2)
    for number, (first, last) in enumerate(blocks):
        expected[first + 1 : last + 1] = [number] * (last - first)
    assert found == expected


@given(st.binary(), st.binary())
def test_crc32_is_that_of_zlib(head, tail):
    value = digest.crc32(tail, digest.crc32(head))

    assert value == zlib.crc32(head + tail)
    assert int(digest.crc32_hex(value), 16) == value
    assert len(digest.crc32_hex(value)) == 8
