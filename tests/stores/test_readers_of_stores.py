"""The readers of checkpoints against real stores on the loopback."""

import errno
import hashlib
import secrets

import numpy as np
import pytest

import mpickpt
from mpickpt import (
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    Sharded,
    StorageError,
)
from mpickpt.storage.stores.opening import open_store
from mpickpt.storage.verification import verify_checkpoint
from tests.ranks_as_threads import run_ranks
from tests.unit.cli_runs import MATRIX, run, save

STEPS = (7, 12)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("saved")
    for step in STEPS:
        save(mpickpt.step_path(run_dir, step), step=step, size=4)
    return run_dir


@pytest.fixture
def memory_url():
    """The URL of an empty bucket of fsspec in this process."""
    return f"memory://bucket-{secrets.token_hex(4)}"


@pytest.fixture(params=["s3", "gcs", "memory"])
def run_url(request, saved_run):
    url = f"{request.getfixturevalue(f'{request.param}_url')}/run"
    store = open_store(url)
    for path in sorted(saved_run.rglob("*")):
        if path.is_file() and ".mpickpt" not in path.parts:
            content = path.read_bytes()
            store.upload(
                path.relative_to(saved_run).as_posix(),
                path,
                nbytes=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
            )
    return url


def shard_of(run_url, step, rank):
    path = mpickpt.step_path(run_url, step)
    return path.name + "/" + mpickpt.read_manifest(path).shards[rank].path


def test_readers_take_the_url_of_a_store(run_url, capsys, tmp_path):
    url = f"{run_url}/step-0000000012"

    assert [entry.step for entry in mpickpt.checkpoints(run_url)] == [7, 12]
    assert str(mpickpt.latest(run_url)) == url
    with mpickpt.open_checkpoint(url) as ckpt:
        assert np.array_equal(ckpt["model/w"][1:5], MATRIX[1:5])
    assert verify_checkpoint(url).is_whole
    status, out, _ = run(capsys, "ls", run_url)
    assert (status, out.count("whole")) == (0, 2)
    status, _, _ = run(capsys, "export", url, "model/w", "-o", tmp_path / "w.npy")
    assert status == 0
    assert np.array_equal(np.load(tmp_path / "w.npy"), MATRIX)
    assert run(capsys, "diff", url, f"{run_url}/step-0000000007")[:2] == (0, "")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_load_takes_the_url_of_a_store(run_url, size):
    def load(comm):
        rows = len(MATRIX) // size
        own = np.zeros((rows, 3), "f4")
        box = Sharded(own, global_shape=MATRIX.shape, offset=(comm.rank * rows, 0))
        like = {"model": {"w": box}}
        url = f"{run_url}/step-0000000012"
        tree = mpickpt.load_sharded(
            url, comm=comm, like=like, reshard=True, unexpected="ignore"
        )
        return tree["model"]["w"].data

    rows = run_ranks(size, load)

    assert np.array_equal(np.concatenate(rows), MATRIX)


def test_damage_in_a_store_is_told(run_url, capsys):
    store, url = open_store(run_url), f"{run_url}/step-0000000012"
    flipped, cut, missing = (shard_of(run_url, 12, rank) for rank in (0, 1, 2))
    content = bytearray(store.read(flipped))
    content[content.find(MATRIX[:1].tobytes()) + 1] ^= 1
    store.put(flipped, bytes(content))
    store.put(cut, store.read(cut)[:-1])
    store.delete([missing])

    report = verify_checkpoint(url)

    assert [type(file.error) for file in report.files] == [
        CorruptShardError,
        IncompleteCheckpointError,
        IncompleteCheckpointError,
        type(None),
        type(None),
    ]
    assert all(f"{url}/" in str(file.error) for file in report.failures)
    assert run(capsys, "verify", url)[0] == 3
    assert "damaged" in run(capsys, "ls", run_url)[1]


def test_prune_and_rm_remove_from_a_store(run_url, capsys):
    assert run(capsys, "prune", run_url, "--keep-last", "1")[0] == 0
    assert [entry.step for entry in mpickpt.checkpoints(run_url)] == [12]

    assert run(capsys, "rm", f"{run_url}/step-0000000012", "--force")[0] == 0
    assert list(open_store(run_url).list()) == []
    assert run(capsys, "ls", run_url)[0] == 4


def test_absent_url_is_not_found(run_url):
    with pytest.raises(CheckpointNotFoundError, match="run holds 2; the latest is"):
        mpickpt.read_manifest(f"{run_url}/step-0000000099")


def test_absent_bucket_is_said(s3_url, capsys):
    url = f"{s3_url.partition('://')[0]}://no-such-bucket/run"

    with pytest.raises(CheckpointNotFoundError, match="bucket"):
        mpickpt.read_manifest(url)
    status, _, err = run(capsys, "ls", url)

    assert status in (4, 5)
    assert "bucket" in err


def test_wrong_credentials_are_no_missing_checkpoint(s3_url, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")

    with pytest.raises(StorageError) as caught:
        mpickpt.read_manifest(f"{s3_url}/run/step-0000000012")

    assert caught.value.errno == errno.EACCES
