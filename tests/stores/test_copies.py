"""Copies of checkpoints to stores and back, against real ones on the loopback."""

import os
import random
import secrets
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

import mpickpt
from mpickpt import Sharded
from mpickpt.errors import (
    CheckpointExistsError,
    CorruptShardError,
    IncompleteCheckpointError,
    StorageError,
)
from mpickpt.format.manifest import dump_manifest
from mpickpt.planning.pace_of_bytes import BytePace
from mpickpt.storage.copy_target import CopyControl
from mpickpt.storage.copying import (
    copy_checkpoint,
    copy_shards,
    missing_ranks,
    publish_copy,
)
from mpickpt.storage.remote_path import RemotePath
from mpickpt.storage.uploader import Uploader, UploadTarget
from mpickpt.storage.verification import verify_checkpoint
from tests.unit.cli_runs import run, save

STEP = "step-0000000007"
SEED = int(os.environ.get("MPICKPT_TEST_SEED", "7"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run") / STEP, size=4)


@pytest.fixture
def manifest(source):
    return mpickpt.read_manifest(source)


@pytest.fixture
def memory_url():
    return f"memory://bucket-{secrets.token_hex(4)}"


@pytest.fixture(params=["s3", "gcs"])
def target(request):
    return RemotePath(f"{request.getfixturevalue(f'{request.param}_url')}/run/{STEP}")


@pytest.fixture(params=["s3", "lax_s3", "gcs", "memory"])
def any_target(request):
    """Of a store of each kind, those that ignore conditions included."""
    return RemotePath(f"{request.getfixturevalue(f'{request.param}_url')}/run/{STEP}")


def names_in(target):
    return sorted(file.name for file in target.store.list())


def require_copy(source, target):
    original, copy = mpickpt.read_manifest(source), mpickpt.read_manifest(target)
    assert copy.checkpoint_id == original.checkpoint_id
    assert copy.shards == original.shards
    assert copy.extra["tier"] | {"copied_at": ""} == {
        "kind": "object",
        "url": str(target),
        "copied_at": "",
    }
    report = verify_checkpoint(target)
    assert report.is_whole
    assert report.rubbish == ()


def test_checkpoint_goes_to_a_store_and_comes_back(source, any_target, tmp_path):
    assert copy_checkpoint(source, any_target, jobs=2)
    assert not copy_checkpoint(source, any_target)
    require_copy(source, any_target)

    back = tmp_path / "empty machine" / STEP
    assert copy_checkpoint(any_target, back)

    assert verify_checkpoint(back).is_whole
    tier = mpickpt.read_manifest(back).extra["tier"]
    assert (tier["kind"], tier["url"]) == ("directory", str(back))


def test_checkpoint_goes_from_store_to_store(source, target, memory_url):
    copy_checkpoint(source, target)
    other = RemotePath(f"{memory_url}/another/{STEP}")

    assert copy_checkpoint(target, other)

    require_copy(source, other)


def test_nothing_is_published_before_all_ranks_are_there(source, manifest, any_target):
    copy_shards(manifest, source, any_target, [0, 2])

    assert missing_ranks(any_target, manifest) == [1, 3]
    with pytest.raises(IncompleteCheckpointError, match="ranks 1, 3"):
        publish_copy(any_target, manifest)
    assert "manifest.json" not in names_in(any_target)
    moved = copy_shards(manifest, source, any_target, range(4))
    assert moved == manifest.shards[1].nbytes + manifest.shards[3].nbytes
    assert publish_copy(any_target, manifest)
    require_copy(source, any_target)


def test_another_checkpoint_is_not_replaced(source, manifest, any_target):
    other = msgspec.structs.replace(manifest, checkpoint_id="f" * 32)
    content = dump_manifest(other)
    copy_shards(manifest, source, any_target, range(4))
    any_target.store.put("manifest.json", content)

    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(source, any_target)
    with pytest.raises(CheckpointExistsError):
        publish_copy(any_target, manifest)

    assert any_target.store.read("manifest.json") == content


def test_damaged_source_is_named_and_nothing_published(source, target, tmp_path):
    copied = tmp_path / STEP
    copy_checkpoint(source, copied)
    path = copied / mpickpt.read_manifest(copied).shards[1].path
    path.write_bytes(bytes(path.stat().st_size))

    with pytest.raises(CorruptShardError) as caught:
        copy_checkpoint(copied, target)

    assert caught.value.path == str(path)
    assert "manifest.json" not in names_in(target)
    assert path.name not in names_in(target)


def test_damaged_object_is_repaired_when_asked(source, manifest, target):
    copy_checkpoint(source, target)
    path = manifest.shards[2].path
    target.store.put(path, bytes(manifest.shards[2].nbytes))
    assert not verify_checkpoint(target).is_whole

    copy_shards(manifest, source, target, [2], replace=True)

    require_copy(source, target)


def test_damaged_object_does_not_come_back(source, manifest, target, tmp_path):
    copy_checkpoint(source, target)
    target.store.put(manifest.shards[2].path, bytes(manifest.shards[2].nbytes))

    with pytest.raises(CorruptShardError):
        copy_checkpoint(target, tmp_path / STEP)

    assert not (tmp_path / STEP / "manifest.json").exists()


def test_uploader_copies_to_a_store(source, manifest, target):
    uploader = Uploader([UploadTarget(run=target.parent)])
    uploader.submit(manifest, source, range(4), publishes=True)

    assert uploader.close(drain=True) == []
    assert uploader.errors() == []
    assert all(s.nbytes_done == s.nbytes for s in uploader.states())
    require_copy(source, target)


def test_commands_take_the_url_of_a_store(source, target, tmp_path, capsys):
    run_dir, url = source.parent, target.parent

    first, out, _ = run(capsys, "flush", run_dir, "--to", url)
    second, _, _ = run(capsys, "flush", run_dir, "--to", url)
    third, _, _ = run(capsys, "cp", target, f"{tmp_path}/")
    fourth, _, _ = run(capsys, "cp", source, url)

    assert (first, second, third, fourth) == (0, 0, 0, 0)
    assert out.startswith(f"{target}: published")
    require_copy(source, target)
    assert verify_checkpoint(tmp_path / STEP).is_whole


def test_speed_of_an_upload_is_bounded(source, manifest, s3_url):
    target = RemotePath(f"{s3_url}/run/{STEP}")
    control = CopyControl(pace=BytePace(manifest.nbytes / 1.0))

    begin_s = time.monotonic()
    copy_shards(manifest, source, target, range(4), control=control)

    assert time.monotonic() - begin_s > 0.6


def test_store_that_is_not_there_is_an_error(source):
    with pytest.raises(StorageError):
        copy_checkpoint(source, RemotePath(f"gopher://nowhere/{STEP}"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint of one shard of several parts."""
    path = tmp_path_factory.mktemp("run") / STEP
    state = {"x": Sharded.block(np.random.default_rng(1).random(6 << 20))}
    mpickpt.save_sharded(state, path, step=7)
    return path


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_flush_killed_in_mid_upload_ends_when_it_is_started_again(
    large, request, kind, tmp_path
):
    run_url = RemotePath(f"{request.getfixturevalue(f'{kind}_url')}/run")
    command = [sys.executable, "-m", "mpickpt", "flush", large.parent, "--to", run_url]
    chosen = random.Random(SEED)

    for _ in range(3):
        slow = [*map(str, command), "--bandwidth", "25MB/s"]
        process = subprocess.Popen(slow, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(chosen.uniform(1.0, 2.5))
        process.kill()
        process.communicate()
        assert (
            mpickpt.latest(run_url) is None
            or verify_checkpoint(run_url / STEP).is_whole
        )

    done = subprocess.run([*map(str, command)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    require_copy(large, run_url / STEP)
