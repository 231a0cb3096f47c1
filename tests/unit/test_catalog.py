import os
import shutil
import threading

import numpy as np
import pytest

import mpickpt
from mpickpt import (
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
    StorageError,
)
from mpickpt.format.digest import BLOCK_NBYTES
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.storage.catalog import rubbish, step_directories
from mpickpt.storage.verification import verify_checkpoint


def save(run_dir, step, **options):
    path = mpickpt.step_path(run_dir, step)
    mpickpt.save_sharded({"x": np.arange(step + 1)}, path, step=step, **options)
    return path


@pytest.fixture
def run_dir(tmp_path):
    run_dir = tmp_path / "run"
    for step in (20, 3, 100):
        save(run_dir, step)
    return run_dir


def test_checkpoints_are_listed_in_order_of_step_whatever_the_times(run_dir):
    os.utime(mpickpt.step_path(run_dir, 3), (2e9, 2e9))

    assert [entry.step for entry in mpickpt.checkpoints(run_dir)] == [3, 20, 100]
    assert mpickpt.latest(run_dir) == run_dir / "step-0000000100"
    assert mpickpt.latest(str(run_dir)) == mpickpt.step_path(run_dir, 100)


def test_directory_without_manifest_is_no_checkpoint(run_dir):
    (mpickpt.step_path(run_dir, 100) / MANIFEST_NAME).unlink()

    assert mpickpt.latest(run_dir) == mpickpt.step_path(run_dir, 20)


def test_foreign_and_rejected_names_are_no_checkpoints(run_dir):
    source = mpickpt.step_path(run_dir, 20)
    for name in ("step-200", "step-0000000200.rejected-0123abcd", "best", ".mpickpt"):
        shutil.copytree(source, run_dir / name)
    (run_dir / "step-0000000300").write_text("a file")
    (run_dir / "notes.txt").write_text("mine")

    assert [entry.step for entry in mpickpt.checkpoints(run_dir)] == [3, 20, 100]
    found = step_directories(run_dir)
    assert [(one.step, one.is_rejected) for one in found][-1] == (200, True)


def test_run_without_directory_has_no_checkpoints(tmp_path):
    assert mpickpt.checkpoints(tmp_path / "absent") == ()
    assert mpickpt.latest(tmp_path / "absent") is None


def test_run_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StorageError, match="Not a directory"):
        mpickpt.checkpoints(tmp_path / "file")


def test_step_path_takes_steps_from_zero(tmp_path):
    assert mpickpt.step_path(tmp_path, np.int64(7)) == tmp_path / "step-0000000007"
    with pytest.raises(ValueError, match="-1"):
        mpickpt.step_path(tmp_path, -1)
    with pytest.raises(TypeError):
        mpickpt.step_path(tmp_path, "7")


def test_manifest_is_read(run_dir):
    manifest = mpickpt.read_manifest(mpickpt.step_path(run_dir, 20))

    assert (manifest.step, manifest.world_size) == (20, 1)
    assert manifest.arrays[0].global_shape == (21,)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent/below", "does not exist; .*run does"),
        (".", "run directory that holds 3; the latest is .*step-0000000100"),
        ("step-0000000003", "1 shards but no manifest.json"),
        ("empty", "is empty"),
        ("other", "holds a.txt, b.txt"),
    ],
)
def test_not_found_tells_what_is_there(run_dir, name, text):
    (mpickpt.step_path(run_dir, 3) / MANIFEST_NAME).unlink()
    (run_dir / "empty").mkdir()
    (run_dir / "other").mkdir()
    for letter in "ab":
        (run_dir / "other" / f"{letter}.txt").write_text("")
    if name == ".":
        save(run_dir, 1)

    with pytest.raises(CheckpointNotFoundError, match=text) as caught:
        mpickpt.read_manifest(run_dir / name)

    assert str((run_dir / name).absolute()) in str(caught.value)


def test_not_found_names_the_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointNotFoundError, match=str(tmp_path / "x")):
        mpickpt.read_manifest("x")


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100_000])
def test_damaged_manifest_is_refused(run_dir, content):
    path = mpickpt.step_path(run_dir, 3)
    (path / MANIFEST_NAME).write_bytes(content)

    with pytest.raises(ManifestError, match="step-0000000003"):
        mpickpt.read_manifest(path)


def test_huge_manifest_is_refused_without_reading_it_all(run_dir):
    path = mpickpt.step_path(run_dir, 3)
    os.truncate(path / MANIFEST_NAME, 1 << 40)

    with pytest.raises(ManifestError):
        mpickpt.read_manifest(path)


@pytest.mark.parametrize("kind", ["fifo", "directory", "symlink"])
def test_manifest_that_is_no_regular_file_is_refused(run_dir, kind):
    manifest = mpickpt.step_path(run_dir, 3) / MANIFEST_NAME
    manifest.rename(run_dir / "moved.json")
    if kind == "fifo":
        os.mkfifo(manifest)
    elif kind == "directory":
        manifest.mkdir()
    else:
        manifest.symlink_to(run_dir / "moved.json")

    with pytest.raises(StorageError):
        mpickpt.read_manifest(manifest.parent)


def test_rubbish_is_told_by_name(run_dir):
    path = mpickpt.step_path(run_dir, 3)
    manifest = mpickpt.read_manifest(path)
    shard = path / manifest.shards[0].path
    left = ["rank00000-00000000.h5", "rank00001-ffffffff.h5.tmp", "manifest.json.tmp"]
    for name in [*left, "notes.txt", "rank.h5"]:
        (path / name).write_text("")
    shard.unlink()

    assert rubbish(path, manifest) == sorted(left)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Three blocks and a bit, of two arrays."""
    path = tmp_path_factory.mktemp("large") / "c"
    arrays = {"x": np.arange(5 << 20, dtype="f4"), "y": np.arange(8 << 20, dtype="f4")}
    mpickpt.save_sharded(arrays, path, step=1)
    return path


@pytest.fixture
def copied(large, tmp_path):
    path = tmp_path / "c"
    shutil.copytree(large, path)
    return path


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("fast", [False, True])
def test_verify_finds_a_whole_checkpoint_whole(large, fast):
    seen = []
    lock = threading.Lock()

    def progress(nbytes):
        with lock:
            seen.append(nbytes)

    report = verify_checkpoint(large, fast=fast, progress=progress)

    assert report.is_whole
    assert report.failures == ()
    assert report.rubbish == ()
    assert sum(seen) == report.manifest.nbytes
    assert [file.path for file in report.files] == [
        report.manifest.shards[0].path,
        report.manifest.layout.path,
    ]


@pytest.mark.parametrize("fast", [False, True])
def test_verify_names_every_damaged_block_and_its_arrays(copied, fast):
    shard = copied / mpickpt.read_manifest(copied).shards[0].path
    flip(shard, BLOCK_NBYTES // 2)
    flip(shard, BLOCK_NBYTES + 77)
    flip(shard, BLOCK_NBYTES * 2 + 77)

    report = verify_checkpoint(copied, fast=fast)

    (failure,) = report.failures
    assert isinstance(failure.error, CorruptShardError)
    assert [(block.number, block.keys) for block in failure.blocks] == [
        (0, ("x",)),
        (1, ("x", "y")),
        (2, ("y",)),
    ]
    assert failure.blocks[1].start == BLOCK_NBYTES


@pytest.mark.parametrize("part", ["table", "index", "head", "tail"])
def test_verify_finds_damage_outside_of_arrays(copied, part):
    manifest = mpickpt.read_manifest(copied)
    record = manifest.shards[0]
    with mpickpt.open_checkpoint(copied) as checkpoint:
        table = checkpoint._fresh.now.shards.of(0).index.table
    offset = {
        "table": table[0],
        "index": record.index[0] + 5,
        "head": 9,
        "tail": record.nbytes - 1,
    }[part]
    flip(copied / record.path, offset)

    assert not verify_checkpoint(copied).is_whole
    assert not verify_checkpoint(copied, fast=True).is_whole


def test_verify_finds_a_file_of_another_whole_sha256(copied):
    import msgspec

    from mpickpt.format.manifest import dump_manifest

    manifest = mpickpt.read_manifest(copied)
    other = msgspec.structs.replace(manifest.shards[0], sha256="0" * 64)
    changed = msgspec.structs.replace(manifest, shards=(other,))
    (copied / MANIFEST_NAME).write_bytes(dump_manifest(changed))

    assert not verify_checkpoint(copied).is_whole
    assert verify_checkpoint(copied, fast=True).is_whole


def test_verify_goes_on_after_the_first_damage(copied):
    manifest = mpickpt.read_manifest(copied)
    (copied / manifest.shards[0].path).unlink()
    flip(copied / manifest.layout.path, 900)

    report = verify_checkpoint(copied)

    missing, layout = report.failures
    assert isinstance(missing.error, IncompleteCheckpointError)
    assert layout.path == manifest.layout.path


def test_verify_reads_the_manifest_again_when_files_are_gone(copied, monkeypatch):
    from mpickpt.storage import verification

    original = verification._verified
    calls = []

    def replaced_before_the_first(directory, manifest, *options):
        calls.append(manifest.step)
        if len(calls) == 1:
            mpickpt.save_sharded({"z": 1}, directory, step=2, overwrite=True)
        return original(directory, manifest, *options)

    monkeypatch.setattr(verification, "_verified", replaced_before_the_first)

    report = verify_checkpoint(copied)

    assert report.is_whole
    assert calls == [1, 2]


def test_manifest_is_read_to_its_end_whatever_size_is_remembered(tmp_path, monkeypatch):
    save(tmp_path, 1)
    path = mpickpt.step_path(tmp_path, 1)
    nbytes = (path / "manifest.json").stat().st_size
    real = os.fstat

    def as_remembered(descriptor):
        found = real(descriptor)
        if found.st_size != nbytes:
            return found
        fields = list(found)
        fields[6] = nbytes + 100  # st_size: of the file that was replaced
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", as_remembered)

    assert mpickpt.read_manifest(path).step == 1
