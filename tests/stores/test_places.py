"""URLs and paths as people type them, and the stores that they open."""

import copy
import errno
import sys
from pathlib import Path

import pytest

from mpickpt.errors import StorageError
from mpickpt.storage.remote_path import RemotePath, parse_place
from mpickpt.storage.stores.opening import open_store


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("run", Path("run")),
        ("/scratch/run", Path("/scratch/run")),
        ("file:///scratch/my%20run", Path("/scratch/my run")),
        ("file://localhost/run", Path("/run")),
        ("s3://bucket/run/", RemotePath("s3://bucket/run")),
        ("GS://bucket", RemotePath("gs://bucket")),
        ("a:b/c", Path("a:b/c")),
    ],
)
def test_a_place_is_a_path_or_remote(text, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").mkdir()

    assert parse_place(text) == place


def test_places_pass_unchanged():
    remote = RemotePath("s3://bucket/run")

    assert parse_place(remote) is remote
    assert parse_place(Path("run")) == Path("run")


@pytest.mark.parametrize(
    "text",
    [
        "simplecache::s3://bucket/run",
        "s3://bucket/../run",
        "s3://bucket//run",
        "file://host/run",
        "file:run:",
    ],
)
def test_what_is_no_place_is_refused(text):
    if text == "file:run:":
        with pytest.raises(ValueError, match="became a Path"):
            parse_place(Path("s3://bucket/run"))
        return
    with pytest.raises(ValueError, match="://"):
        parse_place(text)


def test_remote_paths_are_walked_like_paths():
    run = RemotePath("s3://bucket/a/run")

    manifest = run / "step-0000000001/manifest.json"

    assert str(manifest) == "s3://bucket/a/run/step-0000000001/manifest.json"
    assert manifest.name == "manifest.json"
    assert manifest.parent.parent == run
    assert {run: 1}[RemotePath("s3://bucket/a/run/")] == 1
    assert run.parent.parent == RemotePath("s3://bucket")
    assert run.parent.parent.parent == RemotePath("s3://bucket")
    assert RemotePath("s3://bucket").name == ""
    with pytest.raises(ValueError, match="not the name"):
        run / ".."


def test_remote_paths_can_be_copied():
    run = RemotePath("s3://bucket/run")

    assert copy.deepcopy(run) == run


def test_a_remote_path_has_the_store_below_it():
    run = RemotePath("memory://place/run")
    run.store.put("step/file", b"x")

    assert (run / "step").store.read("file") == b"x"
    assert run.store.url == str(run)


def test_a_store_needs_a_bucket():
    for url in ("s3://", "gs://"):
        with pytest.raises(ValueError, match="names no bucket"):
            open_store(url)


@pytest.mark.parametrize(
    ("url", "library"),
    [("s3://bucket", "boto3"), ("gs://bucket", "google.cloud"), ("x://y", "fsspec")],
)
def test_a_client_that_is_missing_is_named(url, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)

    with pytest.raises(StorageError, match=r"pip install mpickpt\[objectstore\]"):
        open_store(url).stat("file")


def test_a_scheme_that_nobody_knows_is_said():
    with pytest.raises(StorageError, match="nonsense") as failure:
        open_store("nonsense://host/path")

    assert failure.value.errno == errno.EPROTONOSUPPORT
