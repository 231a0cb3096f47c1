"""Reads shards with tools that know nothing of this library."""

import hashlib
import re
import shutil
import subprocess
import time

import numpy as np
import pytest

from mpickpt import PerRank, Replicated, Sharded, read_manifest, save_sharded
from tests.ranks_as_threads import run_ranks

h5py = pytest.importorskip("h5py")
ml_dtypes = pytest.importorskip("ml_dtypes")

needs_h5dump = pytest.mark.skipif(
    shutil.which("h5dump") is None, reason="h5dump is not installed (hdf5-tools)"
)

HALF = np.array([0.0, -1.5, 65504.0, 6e-8, np.inf], np.float16)
BRAIN = np.array([0.0, -1.5, 3.390625, 1e30, -np.inf], ml_dtypes.bfloat16)
INTS = {
    name: np.array([np.iinfo(name).min, 0, 7, np.iinfo(name).max], name)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "int64", "uint64", ">i4")
}


def state_of(rank):
    return {
        "model": {
            "half": Sharded.block(HALF),
            "brain": Sharded.block(BRAIN),
            "matrix": Sharded.block(np.arange(6, dtype=np.float64).reshape(2, 3)),
        },
        "ints": {name: PerRank(array) for name, array in INTS.items()},
        "scalar": Replicated(np.array(2.5)),
        "a/b": PerRank(np.arange(3)),
        "pieces": Sharded.pieces(
            [((rank,), np.full(1, rank)), ((rank + 2,), np.full(1, rank + 2))],
            global_shape=(4,),
        ),
        "step": 7,
    }


def save(path):
    def save_rank(comm):
        return save_sharded(state_of(comm.rank), path, step=7, comm=comm)

    for outcome in run_ranks(2, save_rank):
        assert not isinstance(outcome, BaseException), outcome


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "checkpoint"
    save(path)
    return path


def shard(checkpoint, rank):
    return checkpoint / read_manifest(checkpoint).shards[rank].path


def dumped(path, key):
    """Return the values that h5dump prints of a dataset."""
    finished = subprocess.run(
        ["h5dump", "-y", "-w", "0", "-m", "%.9g", "-d", key, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    # Where it cannot read, it prints an empty block and returns 0.
    block = re.search(r"DATA \{\s*(.*?)\s*\}", finished.stdout, re.DOTALL)
    assert block and block[1], finished.stdout + finished.stderr
    return [float(text) for text in re.split(r",\s*", block[1].replace("\n", " "))]


def test_sha256sum_prints_the_digest_of_the_manifest(checkpoint):
    manifest = read_manifest(checkpoint)
    expected = {s.path: s.sha256 for s in manifest.shards}
    expected[manifest.layout.path] = manifest.layout.sha256

    printed = subprocess.run(
        ["sha256sum", *expected],
        cwd=checkpoint,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    lines = (line.split() for line in printed.splitlines())
    assert {path: digest for digest, path in lines} == expected


def test_digest_of_the_manifest_is_over_its_zeroed_self(checkpoint):
    text = (checkpoint / "manifest.json").read_bytes()
    digest = read_manifest(checkpoint).manifest_sha256.encode()

    zeroed = text.replace(digest, b"0" * 64)

    assert hashlib.sha256(zeroed).hexdigest().encode() == digest


@needs_h5dump
@pytest.mark.parametrize(
    ("key", "array"),
    [
        ("/model/half", HALF),
        ("/model/brain", BRAIN),
        *((f"/ints/{name}", array) for name, array in INTS.items()),
        ("/scalar", np.array([2.5])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_h5dump_prints_the_values(checkpoint, key, array):
    rank = 0 if key != "/scalar" else owner_of_scalar(checkpoint)

    values = dumped(shard(checkpoint, rank), key)

    np.testing.assert_allclose(values, array.astype(np.float64), rtol=1e-8)


def owner_of_scalar(checkpoint):
    """Return the rank that wrote the replicated value."""
    for rank in range(2):
        with h5py.File(shard(checkpoint, rank)) as file:
            if "scalar" in file:
                return rank
    raise AssertionError("no shard has it")


@needs_h5dump
def test_h5dump_says_what_the_index_says(checkpoint):
    finished = subprocess.run(
        ["h5dump", "-d", "/%mpickpt/index", str(shard(checkpoint, 0))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "schema_version" in finished.stdout
    assert "model/half" in finished.stdout


@needs_h5dump
def test_h5ls_lists_every_array(checkpoint):
    finished = subprocess.run(
        ["h5ls", "-r", str(shard(checkpoint, 1))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    for name in ("/model/half", "/model/brain", "/ints/int8", "/a%2Fb", "/pieces"):
        assert re.search(rf"^{re.escape(name)}\s", finished.stdout, re.MULTILINE)


@pytest.mark.parametrize("rank", [0, 1])
def test_plain_h5py_reads_every_array(checkpoint, rank):
    with h5py.File(shard(checkpoint, rank)) as file:
        assert file["model/half"][...].tobytes() == HALF.tobytes()
        assert file["model/matrix"][...].tolist() == [[0, 1, 2], [3, 4, 5]]
        for name, array in INTS.items():
            assert file["ints"][name].dtype == array.dtype
            assert file["ints"][name][...].tobytes() == array.tobytes()
        assert file["a%2Fb"][...].tolist() == [0, 1, 2]
        pieces = [file["pieces/%piece0"][0], file["pieces/%piece1"][0]]
        assert pieces == [rank, rank + 2]
        offset, nbytes = file["model/brain"].id.get_offset(), BRAIN.nbytes
    content = shard(checkpoint, rank).read_bytes()[offset : offset + nbytes]
    assert content == BRAIN.tobytes()


@pytest.mark.parametrize("rank", [0, 1])
def test_shard_has_nothing_that_is_not_plain(checkpoint, rank):
    def require_plain(name, item):
        if not isinstance(item, h5py.Dataset):
            return
        creation = item.id.get_create_plist()
        assert creation.get_layout() == h5py.h5d.CONTIGUOUS, name
        assert creation.get_nfilters() == 0, name
        assert creation.get_external_count() == 0, name
        assert not creation.get_obj_track_times(), name

    with h5py.File(shard(checkpoint, rank)) as file:
        file.visititems(require_plain)


def test_same_state_gives_the_same_digests_seconds_later(checkpoint, tmp_path):
    # HDF5 keeps times in whole seconds: another second has to come.
    published = (checkpoint / "manifest.json").stat().st_mtime
    time.sleep(max(0.0, published + 2.1 - time.time()))

    save(tmp_path / "again")

    first, again = read_manifest(checkpoint), read_manifest(tmp_path / "again")
    assert [s.sha256 for s in again.shards] == [s.sha256 for s in first.shards]
    assert [s.crc32 for s in again.shards] == [s.crc32 for s in first.shards]
    assert again.layout.sha256 == first.layout.sha256
    assert again.checkpoint_id != first.checkpoint_id
