import os
import shutil

import msgspec
import numpy as np
import pytest

import mpickpt
from mpickpt import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    LayoutError,
    ManifestError,
    StorageError,
)
from mpickpt.format.digest import BLOCK_NBYTES
from tests.unit.saved_checkpoint import (
    SHARED,
    change_manifest,
    entry,
    forge_index,
)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Three blocks and a bit of one array."""
    path = tmp_path_factory.mktemp("large") / "c"
    array = np.arange(13 << 20, dtype="f4").reshape(-1, 1024)
    mpickpt.save_sharded({"x": array, "y": np.arange(3)}, path, step=1)
    return path


def test_damage_is_found_where_it_is_read_and_nowhere_else(large, tmp_path):
    path = tmp_path / "c"
    shutil.copytree(large, path)
    shard = path / mpickpt.read_manifest(path).shards[0].path
    with shard.open("r+b") as file:
        file.seek(BLOCK_NBYTES * 2 + 77)
        file.write(b"\xff")

    with mpickpt.open_checkpoint(path) as checkpoint:
        assert checkpoint["x"][0, 7] == 7
        with pytest.raises(CorruptShardError, match=r"block 2, .*'x'") as caught:
            checkpoint["x"][9000]
        assert caught.value.path == str(shard)
        with pytest.raises(CorruptShardError):
            checkpoint.load()


def test_missing_shard_is_incomplete(copied):
    (copied / mpickpt.read_manifest(copied).shards[1].path).unlink()

    with (
        mpickpt.open_checkpoint(copied) as checkpoint,
        pytest.raises(IncompleteCheckpointError, match="is missing"),
    ):
        checkpoint.load()


def test_cut_shard_is_incomplete(copied):
    shard = copied / mpickpt.read_manifest(copied).shards[1].path
    os.truncate(shard, shard.stat().st_size - 1)

    with mpickpt.open_checkpoint(copied) as checkpoint:
        with pytest.raises(IncompleteCheckpointError) as caught:
            checkpoint["model/rows"][:]
        assert caught.value.actual == caught.value.expected - 1


def test_checkpoint_deleted_meanwhile_is_not_found(copied):
    with mpickpt.open_checkpoint(copied) as checkpoint:
        shutil.rmtree(copied)

        with pytest.raises(CheckpointNotFoundError):
            checkpoint.load()


def test_checkpoint_replaced_meanwhile_is_read_anew(tmp_path):
    path = tmp_path / "c"
    mpickpt.save_sharded({"x": np.arange(3)}, path, step=1)
    with mpickpt.open_checkpoint(path) as checkpoint:
        array = checkpoint["x"]
        mpickpt.save_sharded({"x": np.arange(3) + 10}, path, step=2, overwrite=True)

        assert array[:].tolist() == [10, 11, 12]
        assert checkpoint.manifest.step == 2


def test_array_replaced_by_another_kind_is_refused(tmp_path):
    path = tmp_path / "c"
    mpickpt.save_sharded({"x": np.arange(3)}, path, step=1)
    with mpickpt.open_checkpoint(path) as checkpoint:
        array = checkpoint["x"]
        mpickpt.save_sharded({"x": np.arange(4.0)}, path, step=2, overwrite=True)

        with pytest.raises(CheckpointError, match="replaced"):
            array[:]


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
def test_shard_that_is_no_regular_file_is_refused(copied, kind):
    shard = copied / mpickpt.read_manifest(copied).shards[0].path
    outside = copied.parent / "outside.h5"
    shard.rename(outside)
    if kind == "symlink":
        shard.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(shard)
    else:
        shard.mkdir()

    with mpickpt.open_checkpoint(copied) as checkpoint, pytest.raises(StorageError):
        checkpoint["model/rows"][:]


def test_shard_directory_that_is_a_symlink_is_refused(tmp_path):
    from mpickpt.format.records import ShardRecord
    from mpickpt.storage.shard_reader import BlockCache, ShardReader

    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "rank00000-00000000.h5").write_bytes(b"x")
    directory = tmp_path / "c"
    directory.mkdir()
    (directory / "ranks00000").symlink_to(outside)
    record = ShardRecord(
        rank=0,
        path="ranks00000/rank00000-00000000.h5",
        nbytes=1,
        sha256="0" * 64,
        crc32="0" * 8,
        param_shard_offset=0,
        param_shard_numel=0,
        index=(0, 1, "0" * 8),
    )

    with pytest.raises(StorageError, match="real one"):
        ShardReader(directory, record, 1001, BlockCache()).require_size()


def forged_gap(document):
    entry(document, "model/rows")["parts"].pop()


def forged_overlap(document):
    parts = entry(document, "model/rows")["parts"]
    parts[0][1], parts[0][2] = [5, 0], [10, 28]


def forged_shape(document):
    entry(document, "shared")["shape"] = [30, 41]


def forged_kind(document):
    entry(document, "shared")["kind"] = "sharded"


def forged_table(document):
    document["table"][1] -= 4


def forged_rank(document):
    document["rank"] = 2


def forged_offset(document):
    entry(document, "model/rows")["parts"][0][0] = document["table"][0] - 8


def forged_ordinal(document):
    document["tree"]["model"]["rows"] = {"$array": 10**6}


def forged_leaf(document):
    leaf = ["model/rows", "sharded", "float32", [2**62], False]
    document["tree"]["model"]["rows"] = {"$leaf": leaf}


def forged_variety(document):
    document["tree"]["lr"] = {"$varies": None}


def forged_overflow(document):
    entry(document, "chain")["shape"] = [2**63]


@pytest.mark.parametrize(
    "forge",
    [
        forged_leaf,
        forged_variety,
        forged_overflow,
        forged_gap,
        forged_overlap,
        forged_shape,
        forged_kind,
        forged_table,
        forged_rank,
        forged_offset,
        forged_ordinal,
    ],
)
@pytest.mark.parametrize("how", ["load", "index"])
def test_forged_index_gives_our_errors_only(copied, forge, how):
    forge_index(copied, 0, forge)

    def read(checkpoint):
        if how == "load":
            return checkpoint.load()
        checkpoint.keys()
        return checkpoint["model/rows"][:], checkpoint["shared"][:]

    with (
        mpickpt.open_checkpoint(copied) as checkpoint,
        pytest.raises((ManifestError, LayoutError, CorruptShardError)),
    ):
        read(checkpoint)


def test_forged_huge_array_is_refused_before_it_is_allocated(copied):
    manifest = mpickpt.read_manifest(copied)
    arrays = tuple(
        msgspec.structs.replace(a, global_shape=(2**40, 2**20))
        if a.key == "shared"
        else a
        for a in manifest.arrays
    )
    change_manifest(copied, arrays=arrays, layout=None)

    with mpickpt.open_checkpoint(copied) as checkpoint:
        with pytest.raises(ManifestError):
            checkpoint.load("shared")
        with pytest.raises((ManifestError, LayoutError)):
            checkpoint["shared"][:]


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_give_our_errors_only(copied, seed):
    rng = np.random.default_rng(seed)
    files = sorted(copied.iterdir())
    for _ in range(25):
        victim = files[rng.integers(len(files))]
        whole = victim.read_bytes()
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        victim.write_bytes(content)

        try:
            with mpickpt.open_checkpoint(copied) as checkpoint:
                np.testing.assert_array_equal(checkpoint.load()["shared"], SHARED)
                checkpoint.keys()
        except CheckpointError:
            pass
        victim.write_bytes(whole)
