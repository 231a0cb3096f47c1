"""The HDF5 file as regions."""

import math
import subprocess
import sys
import time

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.format.digest import n_blocks
from mpickpt.storage.memory_file import MemoryFile
from mpickpt.storage.shard_image import PartSpec, build_image

INDEX = b'{"tree": 1}'.ljust(64)


def specs_of(arrays):
    return [
        PartSpec(name=name, dtype=array.dtype, shape=array.shape)
        for name, array in arrays.items()
    ]


def image_of(arrays, **options):
    return build_image(specs_of(arrays), lambda offsets: len(INDEX), **options)


def file_of(image, arrays):
    """Put an image and its arrays together in the plainest way."""
    content = bytearray(image.nbytes)
    regions = [*image.static, (image.index_offset, INDEX)]
    for offset, array in zip(image.part_offsets, arrays.values(), strict=True):
        if offset is not None:
            regions.append((offset, array.tobytes()))
    for offset, piece in regions:
        content[offset : offset + len(piece)] = piece
    return bytes(content)


def dumped(path, *names):
    options = [word for name in names for word in ("-d", name)]
    # HDF5 1.10 prints an empty block and returns 0 where it cannot read.
    command = ["h5dump", *options, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="i8").reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.array(2.5, "f2"),
        np.zeros((0, 3), "f4"),
        np.zeros((3, 0), "f4"),
        np.array([True, False]),
        np.array([1 + 2j], "c8"),
        np.arange(3, dtype=np.longdouble),
        np.array([b"ab", b"c"]),
        np.zeros((2,) * 8, "u1"),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_image_is_a_file_that_h5py_reads(tmp_path, array):
    arrays = {"model/w": array, "model/other": np.ones(3)}
    image = image_of(arrays)
    (tmp_path / "shard.h5").write_bytes(file_of(image, arrays))

    with h5py.File(tmp_path / "shard.h5") as file:
        got = file["model/w"][()]
        index = file["%mpickpt/index"][()]
        table = file["%mpickpt/table"]

        np.testing.assert_array_equal(got, array)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert index == INDEX.rstrip()
        assert table.dtype == "<u4"
        assert table.id.get_offset() == image.table_offset


@pytest.mark.parametrize(
    ("array", "attribute", "stored_shape"),
    [
        (np.array(["2020-01-01", "NaT"], "M8[s]"), "datetime64[s]", (2,)),
        (np.array([5], "m8[ns]"), "timedelta64[ns]", (1,)),
        (np.array(["abc", "d"]), "U3", (2, 3)),
        (np.array("abc"), "U3", (3,)),
    ],
)
def test_image_tells_the_dtype_where_hdf5_has_none(
    tmp_path, array, attribute, stored_shape
):
    arrays = {"a": array}
    (tmp_path / "shard.h5").write_bytes(file_of(image_of(arrays), arrays))

    with h5py.File(tmp_path / "shard.h5") as file:
        dataset = file["a"]

        assert dataset.attrs["mpickpt_dtype"] == attribute.encode()
        assert dataset.shape == stored_shape
        assert dataset[()].tobytes() == array.tobytes()


def test_h5dump_prints_the_numbers(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    numbers = [0.5, -1.5, 3.0]
    arrays = {
        name: np.array(numbers, dtype)
        for name, dtype in (
            ("half", "f2"),
            ("brain", ml_dtypes.bfloat16),
            ("quarter", ml_dtypes.float8_e5m2),
        )
    } | {"whole": np.array([7, -8], "i4"), "z%2F/deep": np.array(9)}
    path = tmp_path / "shard.h5"
    path.write_bytes(file_of(image_of(arrays), arrays))

    for name in ("half", "brain", "quarter"):
        assert "(0): 0.5, -1.5, 3\n" in dumped(path, name)
    assert "(0): 7, -8\n" in dumped(path, "whole")
    assert "(0): 9\n" in dumped(path, "/z%2F/deep")
    assert '{"tree": 1}' in dumped(path, "/%mpickpt/index")


def test_image_is_the_same_some_seconds_later():
    arrays = {f"g{n % 7}/w{n}": np.zeros((n, 2), "f4") for n in range(200)}
    first = image_of(arrays)

    time.sleep(1.1)

    assert image_of(arrays) == first


def test_table_lies_last_and_covers_every_block():
    arrays = {f"w{n}": np.broadcast_to(np.float32(0), (5 << 20,)) for n in range(9)}

    image = image_of(arrays)

    table_end = image.table_offset + image.table_nbytes
    length = n_blocks(image.table_offset) + n_blocks(image.nbytes - table_end)
    assert image.table_nbytes == 4 * length
    assert image.table_offset > max(*image.part_offsets, image.index_offset)


def test_large_parts_are_aligned_and_small_ones_are_not():
    arrays = {"small": np.zeros(100, "u1"), "large": np.zeros(500_000, "u1")}

    image = image_of(arrays, alignment=4096)

    small, large = image.part_offsets
    assert large % 4096 == 0
    assert image.nbytes < 510_000
    assert small < large


def test_parts_lie_in_the_order_given():
    arrays = {f"w{n:03d}": np.zeros(1 + n % 5, "f8") for n in reversed(range(300))}

    offsets = image_of(arrays).part_offsets

    assert list(offsets) == sorted(offsets)


def test_index_length_is_asked_with_the_offsets():
    asked = []

    def length(offsets):
        asked.append(offsets)
        return 1000

    specs = specs_of({"a": np.zeros(3), "empty": np.zeros((0, 2))})
    image = build_image(specs, length)

    assert asked[-1] == image.part_offsets
    assert image.part_offsets[1] is None
    assert image.index_nbytes == 1000


def test_image_has_more_axes_than_hdf5_allows(tmp_path):
    shape = (1,) * 20 + (2,) + (1,) * 20
    spec = PartSpec(name="deep", dtype=np.dtype("f4"), shape=shape)

    image = build_image([spec], lambda offsets: 1)

    assert image.part_offsets[0] is not None


def test_image_of_40_gib_takes_no_memory():
    spec = PartSpec(name="w", dtype=np.dtype("f4"), shape=(10 << 30,))

    image = build_image([spec], lambda offsets: 100)

    assert image.nbytes > 40 << 30
    assert sum(len(content) for _, content in image.static) < 10_000


def test_image_of_10_000_parts_takes_less_than_a_second():
    specs = [
        PartSpec(
            name=f"layer{n // 100}/w{n % 100}", dtype=np.dtype("f4"), shape=(1024,)
        )
        for n in range(10_000)
    ]

    begin = time.process_time()
    image = build_image(specs, lambda offsets: 1 << 20)
    seconds = time.process_time() - begin

    assert len(image.part_offsets) == 10_000
    assert seconds < 1.0


def test_stream_does_not_import_h5py():
    code = "import sys, mpickpt.storage.stream; print('h5py' in sys.modules)"

    printed = subprocess.check_output([sys.executable, "-c", code], text=True)

    assert printed == "False\n"


writes = st.lists(st.tuples(st.integers(0, 60), st.binary(min_size=1, max_size=30)))


@given(writes, st.integers(0, 80), st.integers(0, 20))
def test_memory_file_holds_what_was_written(written, start, length):
    memory, model, touched = MemoryFile(), bytearray(200), set()
    for offset, content in written:
        memory.seek(offset)
        memory.write(memoryview(content))
        model[offset : offset + len(content)] = content
        touched |= set(range(offset, offset + len(content)))
    got = bytearray(length)
    memory.seek(start)
    memory.readinto(memoryview(got))

    assert got == model[start : start + length]
    covered = set()
    for offset, content in memory.runs():
        assert content == model[offset : offset + len(content)]
        covered |= set(range(offset, offset + len(content)))
    assert covered == touched
    assert memory.nbytes == max((o + len(c) for o, c in written), default=0)


@given(writes, st.integers(0, 100))
def test_memory_file_forgets_what_was_cut_off(written, size):
    memory = MemoryFile()
    for offset, content in written:
        memory.seek(offset)
        memory.write(memoryview(content))

    memory.truncate(size)

    assert all(offset + len(content) <= size for offset, content in memory.runs())
    assert memory.seek(0, 2) == size
    assert math.isfinite(memory.tell())
