"""One shard between memory and disk, and everything that can go wrong there."""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpickpt.errors import (
    CheckpointError,
    CorruptShardError,
    IncompleteCheckpointError,
    StorageError,
)
from mpickpt.format.digest import BLOCK_NBYTES
from mpickpt.storage.delivery import Delivery, placed_at
from mpickpt.storage.ring import Ring
from mpickpt.storage.shard_image import PartSpec, build_image
from mpickpt.storage.stream import (
    BlockCrc32,
    NoCheck,
    WholeFileSha256,
    read_shard,
    read_verified,
    write_shard,
)

INDEX = b"{}".ljust(256)
PAGE = 4096


@pytest.fixture(autouse=True)
def no_thread_survives():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


class Shard:
    """A state, its image, and the file that was written from it."""

    def __init__(self, directory, arrays):
        self.path = directory / "rank00000-0123abcd.h5"
        self.arrays = arrays
        specs = [
            PartSpec(name=f"w{n}", dtype=array.dtype, shape=array.shape)
            for n, array in enumerate(arrays)
        ]
        self.image = build_image(specs, lambda offsets: len(INDEX))

    def write(self, *, direct=False, **options):
        self.digest = write_shard(
            self.path, self.image, INDEX, self.arrays, direct=direct, **options
        )
        return self.digest

    def table(self):
        place = (self.image.table_offset, self.image.table_nbytes)
        return read_verified(self.path, *place, self.digest.crc32)

    def check(self, name):
        if name == "sha256":
            return WholeFileSha256(self.digest.sha256)
        if name == "crc32":
            return BlockCrc32(self.image.table_offset, self.table())
        return NoCheck()

    def read(self, check, *, spans=None, into=None, direct=False, **options):
        out = into or [np.zeros_like(array) for array in self.arrays]
        placed = zip(self.image.part_offsets, out, strict=True)
        read_shard(
            self.path,
            nbytes=self.image.nbytes,
            spans=spans or [(0, self.image.nbytes)],
            check=check,
            deliver=Delivery(
                [placed_at(*pair) for pair in placed if pair[0] is not None]
            ),
            direct=direct,
            **options,
        )
        return out


def random_array(nbytes, seed=0):
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), "u1")


@pytest.fixture
def shard(tmp_path):
    """Three blocks of 16 MiB, the last one short, and no length a round number."""
    return Shard(tmp_path, [random_array(n, n) for n in (20_000_001, 5, 15_000_003)])


ARRAYS = {
    "0d": np.array(1.5),
    "empty": np.zeros((0, 5)),
    "c_order": np.arange(600_000.0).reshape(600, 1000),
    "fortran": np.asfortranarray(np.arange(600_000.0).reshape(600, 1000)),
    "strided": np.arange(400_000, dtype="i4")[::-3],
    "strided_2d": np.arange(600_000, dtype="f4").reshape(600, 1000)[1::2, 3:900:7],
    "broadcast": np.broadcast_to(np.float32(3), (50, 4000)),
    "big_endian": np.arange(1000, dtype=">i2"),
    "longdouble": np.arange(1000, dtype=np.longdouble),
    "clongdouble": np.arange(10, dtype=np.clongdouble),
    "datetime": np.array(["2020-01-01", "NaT"], "M8[us]"),
    "text": np.array(["abc", "ü"]),
    "bytes": np.array([b"ab", b"c"]),
    "bool": np.arange(77) % 2 == 0,
    "many_axes": np.arange(720).reshape(2, 3, 4, 5, 6)[:, ::-1],
}


@pytest.mark.parametrize("block_nbytes", [PAGE, 3 * PAGE, 8 << 20])
@pytest.mark.parametrize("direct", [True, False])
def test_every_kind_of_array_comes_back(tmp_path, direct, block_nbytes):
    arrays = list(ARRAYS.values())
    arrays[3].flags.writeable = False
    shard = Shard(tmp_path, arrays)

    shard.write(direct=direct, block_nbytes=block_nbytes)
    back = shard.read(shard.check("sha256"), direct=direct, block_nbytes=block_nbytes)

    for name, array, got in zip(ARRAYS, arrays, back, strict=True):
        np.testing.assert_array_equal(got, array, err_msg=name)


def test_ml_dtypes_come_back(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = ("bfloat16", "float8_e5m2", "float8_e4m3fn")
    shard = Shard(tmp_path, [np.arange(8).astype(getattr(ml_dtypes, n)) for n in names])

    shard.write()

    for array, got in zip(shard.arrays, shard.read(NoCheck()), strict=True):
        assert got.tobytes() == array.tobytes()


def test_arrays_of_any_memory_order_are_filled(tmp_path):
    array = np.arange(600_000.0).reshape(600, 1000)
    shard = Shard(tmp_path, [array, array, array])
    shard.write()
    into = [
        np.zeros((1000, 600)).T,
        np.zeros((600, 2000))[:, ::2],
        np.zeros((600, 1000)),
    ]

    shard.read(shard.check("crc32"), into=into)

    for got in into:
        np.testing.assert_array_equal(got, array)


def test_digests_are_those_of_the_file(shard):
    digest = shard.write()

    content = shard.path.read_bytes()
    image = shard.image
    table = content[image.table_offset : image.table_offset + image.table_nbytes]
    blocks = [
        content[start : min(start + BLOCK_NBYTES, image.table_offset)]
        for start in range(0, image.table_offset, BLOCK_NBYTES)
    ]
    assert digest.nbytes == len(content)
    assert digest.sha256 == hashlib.sha256(content).hexdigest()
    assert digest.crc32 == f"{zlib.crc32(table):08x}"
    assert digest.index_crc32 == f"{zlib.crc32(INDEX):08x}"
    assert table == np.array([zlib.crc32(b) for b in blocks], "<u4").tobytes()


def test_sha256sum_prints_the_digest(shard):
    digest = shard.write(direct=True)

    printed = subprocess.check_output(["sha256sum", shard.path], text=True)

    assert printed.split()[0] == digest.sha256


def test_bytes_do_not_depend_on_how_they_are_written(shard):
    digests = set()
    for direct, block_nbytes in ((True, 1 << 20), (False, 8 << 20), (True, 5 * PAGE)):
        digests.add(shard.write(direct=direct, block_nbytes=block_nbytes).sha256)
        shard.path.unlink()

    assert len(digests) == 1


def test_long_double_padding_does_not_change_the_digest(tmp_path):
    digests = set()
    for fill in (0, 255):
        raw = np.full(160, fill, "u1")
        array = raw.view(np.longdouble)
        array[:] = np.arange(10)
        digests.add(Shard(tmp_path / str(fill), [array]).image.nbytes)
        (tmp_path / str(fill)).mkdir()
        digests.add(Shard(tmp_path / str(fill), [array]).write().sha256)

    assert len(digests) == 2


def test_arrays_are_not_modified(tmp_path):
    raw = np.full(160, 255, "u1")
    before = raw.copy()

    Shard(tmp_path, [raw.view(np.longdouble)]).write()

    np.testing.assert_array_equal(raw, before)


def test_write_refuses_a_file_that_exists(shard):
    shard.path.write_bytes(b"mine")

    with pytest.raises(StorageError):
        shard.write()

    assert shard.path.read_bytes() == b"mine"


@pytest.mark.parametrize("block_nbytes", [0, 4097, 32 << 20])
def test_write_refuses_odd_blocks(shard, block_nbytes):
    with pytest.raises(ValueError, match="block_nbytes"):
        shard.write(block_nbytes=block_nbytes)


def test_write_refuses_arrays_that_are_not_those_of_the_image(shard):
    shard.arrays[1] = np.zeros(50_000_000, "u1")

    with pytest.raises(ValueError, match="larger than the image"):
        shard.write()

    assert not shard.path.exists()


@pytest.mark.parametrize("direct", [True, False])
def test_short_writes_are_continued(shard, monkeypatch, direct):
    offsets = shorten(monkeypatch, "pwrite", limit=300_001)

    digest = shard.write(direct=direct)

    assert hashlib.sha256(shard.path.read_bytes()).hexdigest() == digest.sha256
    assert len(offsets) > 100


@pytest.mark.parametrize("limit", [100, 300_001])
@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_are_continued(tmp_path, monkeypatch, direct, limit):
    shard = Shard(tmp_path, [random_array(1_000_001)])
    shard.write()
    check = shard.check("sha256")
    shorten(monkeypatch, "preadv", limit)

    (got,) = shard.read(check, direct=direct)

    np.testing.assert_array_equal(got, shard.arrays[0])


def shorten(monkeypatch, name, limit):
    """Shorten pwrite or preadv; refuse odd direct offsets as the kernel does."""
    original, offsets = getattr(os, name), []

    def call(descriptor, view, offset):
        is_direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        offsets.append(offset)
        if is_direct and offset % 512:
            raise OSError(errno.EINVAL, "odd offset")
        part = limit + -limit % 512 if is_direct else limit
        if name == "pwrite":
            return original(descriptor, view[:part], offset)
        return min(limit, original(descriptor, [view[0][:part]], offset))

    monkeypatch.setattr(os, name, call)
    return offsets


def test_write_goes_through_the_cache_where_direct_is_refused(shard, monkeypatch):
    original = os.pwrite

    def refuse(descriptor, view, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", refuse)

    digest = shard.write(direct=True)

    assert hashlib.sha256(shard.path.read_bytes()).hexdigest() == digest.sha256


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("nth", [1, 3, 5])
def test_write_error_of_a_thread_is_raised_with_its_path(shard, monkeypatch, nth, code):
    calls, original = [], os.pwrite

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) == nth:
            raise OSError(code, os.strerror(code))
        return original(*arguments)

    monkeypatch.setattr(os, "pwrite", fail)

    with pytest.raises(StorageError) as caught:
        shard.write()

    assert (caught.value.errno, caught.value.path) == (code, str(shard.path))
    assert not shard.path.exists()


def test_pipeline_stops_soon_after_a_write_failed(tmp_path, monkeypatch):
    shard = Shard(tmp_path, [np.zeros(64 << 20, "u1")])
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)

    with pytest.raises(StorageError):
        shard.write(block_nbytes=1 << 20)

    assert len(calls) <= 8


def test_sync_that_fails_is_not_tried_again(shard):
    calls = []

    def sync(descriptor, path):
        calls.append(path)
        raise StorageError("cannot sync", errno=errno.EIO, path=str(path))

    with pytest.raises(StorageError):
        shard.write(sync=sync)

    assert calls == [shard.path]
    assert not shard.path.exists()


def test_write_reports_a_close_that_fails(shard, monkeypatch):
    original = os.close

    def close(descriptor):
        original(descriptor)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", close)

    with pytest.raises(StorageError) as caught:
        shard.write()

    assert caught.value.errno == errno.EDQUOT


def test_write_ends_when_cancelled(shard):
    cancelled = threading.Event()
    cancelled.set()

    with pytest.raises(CheckpointError, match="cancelled"):
        shard.write(cancelled=cancelled)

    assert not shard.path.exists()


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(point)]
    try:
        subprocess.run(mount, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs root to mount a tmpfs")
    yield point
    subprocess.run(["umount", point], check=True)


@pytest.mark.parametrize("direct", [True, False])
def test_full_disk_is_reported_and_freed(small_disk, direct):
    shard = Shard(small_disk, [random_array(9 << 20)])

    with pytest.raises(StorageError) as caught:
        shard.write(direct=direct, block_nbytes=1 << 20)

    assert caught.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []


INJECTED = """
import os, sys, threading
from pathlib import Path
import numpy as np
from mpickpt.errors import StorageError
from mpickpt.storage.shard_image import PartSpec, build_image
from mpickpt.storage.stream import NoCheck, read_shard, write_shard

path, array = Path(sys.argv[1]), np.zeros(20 << 20, "u1")
spec = PartSpec(name="w", dtype=array.dtype, shape=array.shape)
image = build_image([spec], lambda offsets: 2)
try:
    write_shard(path, image, b"{}", [array], direct=False, block_nbytes=1 << 20)
    read_shard(path, nbytes=image.nbytes, spans=[(0, image.nbytes)], check=NoCheck(),
               deliver=lambda offset, view: None, direct=False, block_nbytes=1 << 20)
except StorageError as error:
    print(error.errno, error.path == str(path), threading.active_count())
"""


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("pwrite64:error=EIO:when=5", errno.EIO),
        ("pwrite64:error=ENOSPC:when=2", errno.ENOSPC),
        ("fsync:error=EIO:when=1", errno.EIO),
        ("fsync:error=EDQUOT:when=1", errno.EDQUOT),
        ("preadv,preadv2:error=EIO:when=1", errno.EIO),
        ("preadv,preadv2:error=ESTALE:when=2+", errno.ESTALE),
    ],
)
def test_fault_of_the_kernel_is_reported(tmp_path, fault, code):
    path, log = tmp_path / "shard.h5", tmp_path / "log"
    name = fault.partition(":")[0]
    command = ["strace", "-f", "-qq", "-o", log, "-e", f"trace={name}"]
    command += ["-e", f"inject={fault}", "-P", path]
    command += [sys.executable, "-c", INJECTED, path]
    try:
        printed = subprocess.check_output(command, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs strace")

    assert printed.split() == [str(code), "True", "1"]
    assert log.read_text().count("fsync(") <= 1


CHECKS = ("sha256", "crc32")


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_flipped_bit_is_found(shard, name, direct, where):
    shard.write()
    check = shard.check(name)
    last = shard.image.nbytes - 1
    flip_bit(shard.path, {"first": 0, "middle": 17_000_000, "last": last}[where])

    with pytest.raises(CorruptShardError) as caught:
        shard.read(check, direct=direct)

    assert caught.value.path == str(shard.path)
    assert caught.value.expected != caught.value.actual


def test_crc32_error_names_the_block(shard):
    shard.write()
    check = shard.check("crc32")
    flip_bit(shard.path, 17_000_000)

    with pytest.raises(CorruptShardError, match="bytes 16777216 to 33554432"):
        shard.read(check)


def test_table_and_index_are_verified(shard):
    shard.write()
    flip_bit(shard.path, shard.image.table_offset)

    with pytest.raises(CorruptShardError):
        shard.table()


def flip_bit(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_blocks_are_read_alone(shard):
    shard.write()
    second = (BLOCK_NBYTES, 2 * BLOCK_NBYTES)
    flip_bit(shard.path, 100_000)

    back = shard.read(shard.check("crc32"), spans=[second], direct=True)

    read = slice(second[0] - shard.image.part_offsets[0], 20_000_001)
    np.testing.assert_array_equal(back[0][read], shard.arrays[0][read])
    assert not back[0][: read.start].any()


@pytest.mark.parametrize("span", [(0, 100), (100, BLOCK_NBYTES), (PAGE, 2 * PAGE)])
@pytest.mark.parametrize("name", CHECKS)
def test_parts_that_cannot_be_verified_are_refused(shard, name, span):
    shard.write()

    with pytest.raises(ValueError, match=r"span|whole"):
        shard.read(shard.check(name), spans=[span])


@pytest.mark.parametrize("nbytes", [0, 4096, 36_000_000])
def test_file_of_another_size_is_incomplete(shard, nbytes):
    shard.write()
    os.truncate(shard.path, nbytes)

    with pytest.raises(IncompleteCheckpointError) as caught:
        shard.read(NoCheck())

    assert (caught.value.expected, caught.value.actual) == (shard.image.nbytes, nbytes)


def test_missing_file_is_incomplete(shard):
    with pytest.raises(IncompleteCheckpointError, match="missing"):
        shard.read(NoCheck())


def test_file_that_is_cut_while_it_is_read_is_an_error(shard):
    shard.write()

    def cut(offset, view):
        os.truncate(shard.path, 1_000_000)

    with pytest.raises(StorageError):
        read_shard(
            shard.path,
            nbytes=shard.image.nbytes,
            spans=[(0, shard.image.nbytes)],
            check=NoCheck(),
            deliver=cut,
            direct=False,
            block_nbytes=1 << 20,
        )


@pytest.mark.parametrize("kind", ["fifo", "symlink", "directory", "device"])
def test_what_is_no_regular_file_is_refused(tmp_path, kind):
    path = tmp_path / "shard.h5"
    make = {
        "fifo": lambda: os.mkfifo(path),
        "symlink": lambda: path.symlink_to("/etc/passwd"),
        "directory": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    make[kind]()

    with pytest.raises(StorageError):
        read_verified(path, 0, 10, "00000000")


def test_range_beyond_the_end_is_incomplete(shard):
    shard.write()

    with pytest.raises(IncompleteCheckpointError, match="at least"):
        read_verified(shard.path, shard.image.nbytes - 5, 10, "00000000")


def test_read_error_of_a_caller_ends_the_threads(shard):
    shard.write()

    def refuse(offset, view):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_shard(
            shard.path,
            nbytes=shard.image.nbytes,
            spans=[(0, shard.image.nbytes)],
            check=NoCheck(),
            deliver=refuse,
            direct=False,
        )


def test_read_ends_when_cancelled(shard):
    shard.write()
    cancelled = threading.Event()
    cancelled.set()

    with pytest.raises(CheckpointError, match="cancelled"):
        shard.read(NoCheck(), cancelled=cancelled)


def test_10_000_small_arrays_come_back(tmp_path):
    shard = Shard(tmp_path, list(random_array(10_000 * 400).reshape(10_000, 400)))

    shard.write()
    back = shard.read(shard.check("sha256"))

    np.testing.assert_array_equal(back, shard.arrays)


PEAK = """
import sys
from pathlib import Path
import numpy as np
from mpickpt.storage.shard_image import PartSpec, build_image
from mpickpt.storage.delivery import Delivery, placed_at
from mpickpt.storage.stream import NoCheck, read_shard, write_shard

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

path = Path(sys.argv[1])
array = np.ones((25_000_000, 8), "u1", order=sys.argv[2])
spec = PartSpec(name="w", dtype=array.dtype, shape=array.shape)
image = build_image([spec], lambda offsets: 2)
before = peak()
write_shard(path, image, b"{}", [array], direct=True)
read_shard(path, nbytes=image.nbytes, spans=[(0, image.nbytes)], check=NoCheck(),
           deliver=Delivery([placed_at(image.part_offsets[0], array)]), direct=True)
print((peak() - before) // 1024)
"""


@pytest.mark.parametrize("order", ["C", "F"])
def test_extra_memory_is_64_mib_at_most(tmp_path, order):
    command = [sys.executable, "-c", PEAK, tmp_path / "shard.h5", order]

    done = subprocess.run(command, capture_output=True, text=True, check=True)

    assert int(done.stdout) <= 64


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.lists(st.integers(1, 50), max_size=6),
)
def test_scatter_puts_every_byte_in_its_place(sizes, cuts):
    arrays = [np.zeros(size, "u1") for size in sizes]
    offsets = np.cumsum([3, *(size + 2 for size in sizes)])[:-1]
    content = np.arange(3 + sum(sizes) + 2 * len(sizes), dtype="u1")
    scatter = Delivery(list(map(placed_at, map(int, offsets), arrays)))

    bounds = [0, *np.cumsum(cuts).tolist(), len(content)]
    bounds = sorted({min(bound, len(content)) for bound in bounds})
    for first, last in pairwise(bounds):
        scatter(first, content[first:last].data)

    for offset, array in zip(offsets, arrays, strict=True):
        np.testing.assert_array_equal(array, content[offset : offset + array.size])


def test_ring_gives_buffers_in_order():
    moved = []
    with Ring(
        lambda view, offset: moved.append((offset, bytes(view))),
        block_nbytes=PAGE,
        depth=3,
        in_flight=1,
    ) as ring:
        for turn in range(10):
            ring.buffer(turn)[:1] = bytes([turn])
            ring.start(turn, turn * PAGE, 1)
        ring.drain()

    assert moved == [(turn * PAGE, bytes([turn])) for turn in range(10)]


def test_ring_raises_the_first_failure_everywhere():
    def fail(view, offset):
        raise OSError(errno.EIO, f"at {offset}")

    with (
        pytest.raises(OSError, match="at 0"),
        Ring(fail, block_nbytes=PAGE, depth=4, in_flight=1) as ring,
    ):
        for turn in range(4):
            ring.start(turn, turn, PAGE)
        ring.drain()
