"""Uploads to S3 that were cut go on where they stopped, in another process."""

import contextlib
import os
import random
import signal
import subprocess
import sys

import boto3
import pytest

from mpickpt.errors import CorruptShardError, StorageError
from mpickpt.storage.stores.opening import open_store
from tests.mpi_launch import REPOSITORY
from tests.stores.fault_proxy import Fault, fault_proxy, s3_error
from tests.stores.servers import s3_environment
from tests.stores.uploads import MIB, PART_NBYTES, PATIENT, source_file

KILL_NBYTES = 64 * MIB
PROGRAM = REPOSITORY / "tests/stores/programs/upload_file.py"


@pytest.fixture
def proxy(s3_url, seaweedfs_server, monkeypatch):
    with fault_proxy(seaweedfs_server.port) as proxy:
        for name, value in s3_environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


def bucket_of(url):
    return url.removeprefix("s3://")


def unfinished(url):
    client = boto3.session.Session().client("s3")
    return client.list_multipart_uploads(Bucket=bucket_of(url)).get("Uploads", [])


def cut_upload(proxy, store, source, name="rank.h5", after=12 * MIB):
    """Let an upload fail for good when so many bytes of parts have come."""
    proxy.decide = lambda request: (
        s3_error(403, "AccessDenied") if proxy.nbytes_of_parts > after else None
    )
    with pytest.raises(StorageError):
        source.upload(store, name)
    proxy.decide = lambda request: None
    proxy.requests.clear()


def upload_and_die(proxy, url, source, at_nbytes, in_flight):
    """Upload in a process that is killed when so many bytes of parts have come."""
    argv = [sys.executable, str(PROGRAM), url, "rank.h5", str(source.path)]
    argv += [source.sha256, str(PART_NBYTES), str(in_flight)]
    process = subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})

    def strike(request, nbytes):
        if proxy.nbytes_of_parts >= at_nbytes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)

    proxy.on_body = strike
    assert process.wait(120) == -signal.SIGKILL
    proxy.on_body = lambda request, nbytes: None


@pytest.mark.parametrize(("in_flight", "seed"), [(1, 1), (2, 2), (2, 3)])
def test_a_killed_upload_sends_little_again(proxy, s3_url, tmp_path, in_flight, seed):
    source = source_file(tmp_path / "rank.h5", KILL_NBYTES)
    draw = random.Random(seed)
    store = open_store(f"{s3_url}/run", PATIENT)

    upload_and_die(
        proxy, store.url, source, draw.randrange(MIB, KILL_NBYTES - MIB), in_flight
    )
    upload_and_die(
        proxy, store.url, source, draw.randrange(KILL_NBYTES - MIB), in_flight
    )
    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content
    assert not unfinished(s3_url)
    # Each kill costs what was under way.
    again = proxy.nbytes_of_parts - KILL_NBYTES
    assert again <= 2 * in_flight * PART_NBYTES


def test_a_file_that_is_there_is_not_sent_again(proxy, s3_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 11 * MIB)
    store = open_store(s3_url, PATIENT)
    source.upload(store, "rank.h5")
    proxy.requests.clear()
    told = []

    source.upload(store, "rank.h5", progress=told.append)

    assert [request.method for request in proxy.requests] == ["HEAD"]
    assert told == [11 * MIB]


def test_what_an_upload_left_counts_as_progress(proxy, s3_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 21 * MIB)
    store = open_store(s3_url, PATIENT)
    cut_upload(proxy, store, source)
    told = []

    source.upload(store, "rank.h5", progress=told.append)

    assert sum(told) == 21 * MIB
    assert proxy.nbytes_of_parts <= 11 * MIB + PART_NBYTES


def test_parts_of_other_bytes_are_not_believed(proxy, s3_url, tmp_path):
    store = open_store(s3_url, PATIENT)
    cut_upload(proxy, store, source_file(tmp_path / "other.h5", 21 * MIB, seed=1))
    source = source_file(tmp_path / "rank.h5", 21 * MIB, seed=2)

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content
    assert store.stat("rank.h5").sha256 == source.sha256
    assert not unfinished(s3_url)


def test_an_upload_that_was_aborted_meanwhile_begins_again(proxy, s3_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 21 * MIB)
    store = open_store(s3_url, PATIENT)
    cut_upload(proxy, store, source)
    client = boto3.session.Session().client("s3")
    (begun,) = unfinished(s3_url)
    told = []

    def decide(request):
        if request.is_part:
            proxy.decide = lambda request: None
            return s3_error(404, "NoSuchUpload")
        return None

    proxy.decide = decide

    source.upload(store, "rank.h5", progress=told.append)

    assert store.read("rank.h5") == source.content
    assert sum(told) == 21 * MIB
    with pytest.raises(client.exceptions.ClientError):
        client.list_parts(
            Bucket=bucket_of(s3_url), Key="rank.h5", UploadId=begun["UploadId"]
        )


def test_an_upload_needs_no_right_to_list_uploads(proxy, s3_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 11 * MIB)
    store = open_store(s3_url, PATIENT)
    proxy.decide = lambda request: (
        s3_error(403, "AccessDenied")
        if request.method == "GET" and "uploads" in request.target
        else None
    )

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content


def test_an_upload_whose_last_answer_was_lost_is_done(proxy, s3_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 11 * MIB)
    store = open_store(s3_url, PATIENT)

    def decide(request):
        if request.method == "POST" and "uploadId=" in request.target:
            proxy.decide = lambda request: None
            return Fault(cut_answer_at=0)
        return None

    proxy.decide = decide

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content


def test_a_damaged_source_leaves_nothing_unfinished(s3_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 11 * MIB)
    store = open_store(s3_url, PATIENT)

    with pytest.raises(CorruptShardError):
        source.upload(store, "rank.h5", sha256="0" * 64)

    assert not unfinished(s3_url)


def test_leftovers_are_removed_by_prefix_and_age(proxy, s3_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 11 * MIB)
    store = open_store(f"{s3_url}/run", PATIENT)
    cut_upload(proxy, store, source, "step-1/rank.h5", after=MIB)
    cut_upload(proxy, store, source, "step-2/rank.h5", after=MIB)

    kept = store.abort_leftovers(older_than_s=3600)
    removed = store.abort_leftovers("step-1/")

    assert (kept, removed) == (0, 1)
    assert [left["Key"] for left in unfinished(s3_url)] == ["run/step-2/rank.h5"]


def test_a_store_that_checks_nothing_is_checked(lax_s3_url, tmp_path, request):
    source = source_file(tmp_path / "rank.h5", 11 * MIB)
    server = request.getfixturevalue("rclone_server")
    with fault_proxy(server.port) as proxy:
        request.getfixturevalue("monkeypatch").setenv(
            "AWS_ENDPOINT_URL", proxy.endpoint
        )
        store = open_store(lax_s3_url, PATIENT)
        proxy.decide = lambda request: (
            Fault(flips="partNumber=2" in request.target) if request.is_part else None
        )
        with pytest.raises(StorageError, match="other bytes arrived"):
            source.upload(store, "rank.h5")
        proxy.decide = lambda request: None

        assert store.stat("rank.h5") is None
        source.upload(store, "rank.h5")
        assert store.read("rank.h5") == source.content


def test_a_store_that_takes_no_part_twice_begins_again(
    lax_s3_url, rclone_server, tmp_path, monkeypatch
):
    with fault_proxy(rclone_server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        store = open_store(lax_s3_url, PATIENT)
        cut_upload(proxy, store, source_file(tmp_path / "other.h5", 21 * MIB, seed=1))
        source = source_file(tmp_path / "rank.h5", 21 * MIB, seed=2)

        source.upload(store, "rank.h5")

        assert store.read("rank.h5") == source.content
