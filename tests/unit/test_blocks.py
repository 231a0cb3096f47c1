"""In which lengths shards are written, and at which offsets."""

import os
import subprocess
import sys

import pytest

from mpickpt.planning.blocks import (
    MAX_BLOCK_NBYTES,
    block_nbytes_for,
    usual_block_nbytes,
)
from mpickpt.planning.file_systems import FileSystem
from mpickpt.planning.stripe_layout import StripeLayout, plain_layout
from mpickpt.planning.striping import PROGRESSIVE
from tests.gpfs_like import preload
from tests.mpi_launch import REPOSITORY

KIB, MIB = 1 << 10, 1 << 20
UNKNOWN = StripeLayout(components=(), is_composite=True)


def file_system(block_nbytes):
    return FileSystem(
        kind="gpfs",
        type="gpfs",
        magic=preload.GPFS_MAGIC,
        point="/gpfs",
        source="gpfs",
        block_nbytes=block_nbytes,
    )


@pytest.mark.parametrize(
    ("block_nbytes", "stripe", "wished", "expected"),
    [
        # Stripes.
        (4096, plain_layout(1, MIB), 4 * MIB, 4 * MIB),
        (4 * MIB, plain_layout(1, MIB), 4 * MIB, 4 * MIB),
        (4 * MIB, plain_layout(1, 64 * KIB), 4 * MIB, 4 * MIB),
        (4 * MIB, plain_layout(1, 3 * MIB), 4 * MIB, 6 * MIB),
        (4 * MIB, plain_layout(1, 8 * MIB), 4 * MIB, 8 * MIB),
        (4 * MIB, plain_layout(1, 9 * MIB), 4 * MIB, 9 * MIB),
        (4 * MIB, plain_layout(1, 9 * MIB), 16 * MIB, 9 * MIB),
        (4 * MIB, plain_layout(1, 16 * MIB), 4 * MIB, 16 * MIB),
        (4 * MIB, plain_layout(1, 16 * MIB), 16 * MIB, 16 * MIB),
        (4 * MIB, PROGRESSIVE.layout, 4 * MIB, 16 * MIB),
        # Longer than any write: a whole fraction.
        (4 * MIB, plain_layout(1, 32 * MIB), 4 * MIB, 16 * MIB),
        (4 * MIB, plain_layout(1, 24 * MIB), 4 * MIB, 12 * MIB),
        (4 * MIB, plain_layout(1, 17 * MIB), 4 * MIB, 17 * MIB // 2),
        (4 * MIB, plain_layout(1, 257 * 64 * KIB), 4 * MIB, 257 * 32 * KIB),
        (4 * MIB, plain_layout(1, 1024 * MIB), 4 * MIB, 16 * MIB),
        # Without a layout, the block.
        (4 * MIB, None, 4 * MIB, 4 * MIB),
        (4 * MIB, UNKNOWN, 4 * MIB, 4 * MIB),
        (16 * MIB, None, 4 * MIB, 16 * MIB),
        (8 * MIB, None, 4 * MIB, 8 * MIB),
        (5 * MIB, None, 4 * MIB, 5 * MIB),
        (MIB, None, 4 * MIB, 4 * MIB),
        (MIB, None, 4096, MIB),
        (256 * KIB, None, 4 * MIB, 4 * MIB),
        (64 * KIB, None, 4 * MIB, 4 * MIB),
        (68 * KIB, None, 4 * MIB, 61 * 68 * KIB),
        # No blocks worth the name.
        (4096, None, 4 * MIB, 4 * MIB),
        (512, None, 4 * MIB, 4 * MIB),
        (0, None, 4 * MIB, 4 * MIB),
        (100_000, None, 4 * MIB, 4 * MIB),
        (32 * MIB, None, 4 * MIB, 4 * MIB),
        (4096, None, 12 * MIB, 12 * MIB),
    ],
)
def test_writes_are_whole_stripes_or_blocks(block_nbytes, stripe, wished, expected):
    found = block_nbytes_for(file_system(block_nbytes), stripe, wished)

    assert found == expected


def test_every_stripe_size_gives_a_length_that_can_be_written():
    for n in [*range(1, 700), 1001, 2047, 4096, 65535]:
        size = n * 64 * KIB
        found = block_nbytes_for(file_system(4096), plain_layout(1, size), 4 * MIB)

        assert 0 < found <= MAX_BLOCK_NBYTES and found % 4096 == 0
        assert found % size == 0 or size % found == 0


def test_small_shards_go_in_small_blocks():
    assert usual_block_nbytes(0) == usual_block_nbytes(16 * MIB) == MIB
    assert usual_block_nbytes(16 * MIB + 1) == usual_block_nbytes(10**12) == 4 * MIB


SAVE = """
import sys
import numpy as np
from pathlib import Path
from mpickpt import Sharded, save_sharded
from mpickpt.storage.filesystem import file_system_of

path = Path(sys.argv[1])
parts = [np.arange(n, dtype=np.uint8) for n in (21 << 20, 5, 700_001, 0, 12 << 20)]
state = {str(n): Sharded.block(part) for n, part in enumerate(parts)}
save_sharded(state, path / "step-0000000001", step=1)
print(file_system_of(path))
"""


@pytest.mark.skipif(preload.why_not() is not None, reason=str(preload.why_not()))
@pytest.mark.parametrize("block_nbytes", [8 * MIB, 16 * MIB, 5 * MIB, MIB])
def test_every_write_of_a_save_to_gpfs_is_of_whole_blocks(tmp_path, block_nbytes):
    gpfs = preload.gpfs_like(tmp_path, block_nbytes=block_nbytes)

    saved = subprocess.run(
        [sys.executable, "-c", SAVE, str(gpfs.directory)],
        env=os.environ | gpfs.environment | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert saved.stdout.startswith("gpfs ("), saved.stderr
    writes = [each for each in gpfs.written() if "rank00000" in each.path.name]
    assert sum(each.nbytes for each in writes) > 33 * MIB
    # What is less than a page at the end of the file goes by itself.
    *whole, last = sorted(
        (each for each in writes if each.nbytes >= 4096), key=lambda each: each.offset
    )
    assert all(each.offset % block_nbytes == 0 for each in [*whole, last])
    assert all(each.nbytes % block_nbytes == 0 for each in whole)
