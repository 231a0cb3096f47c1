"""Boxes of a tensor land where the whole array has them."""

import os

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.hyperslab import Hyperslab
from mpickpt.interop.safetensors.file import write_box
from mpickpt.storage.shard_file import ShardFile


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    low, high = [a for a, _ in bounds], [b for _, b in bounds]
    return shape, Hyperslab(
        tuple(low), tuple(b - a for a, b in zip(low, high, strict=True))
    )


@given(case=boxes(), start=st.integers(0, 9))
def test_box_is_written_to_its_place(case, start):
    shape, box = case
    array = np.zeros(shape, "u2")
    part = np.arange(1, box.size + 1, dtype="u2").reshape(box.shape)
    array[box.slices()] = part
    descriptor = os.memfd_create("tensor")
    try:
        os.truncate(descriptor, start + array.nbytes)
        out = ShardFile(descriptor, "tensor", nbytes=start + array.nbytes, direct=False)

        write_box(out, start, shape, box, part)

        assert os.pread(descriptor, 1 << 16, 0) == bytes(start) + array.tobytes()
    finally:
        os.close(descriptor)
