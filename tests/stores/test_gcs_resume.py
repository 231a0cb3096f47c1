"""Uploads to Google Cloud Storage that were cut go on where they stopped."""

import dataclasses

import pytest

from mpickpt.errors import CorruptShardError, StorageError
from mpickpt.storage.stores.opening import open_store
from tests.stores.fault_proxy import fault_proxy, s3_error
from tests.stores.uploads import MIB, PART_NBYTES, PATIENT, source_file


@pytest.fixture
def proxy(gcs_url, gcs_server, monkeypatch):
    with fault_proxy(gcs_server.port) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.endpoint)
        yield proxy


def nbytes_sent(proxy):
    return sum(request.nbytes for request in proxy.requests)


def cut_upload(proxy, store, source, name="rank.h5"):
    """Let an upload fail for good after two parts have come."""
    proxy.decide = lambda request: (
        s3_error(403, "no") if nbytes_sent(proxy) > 11 * MIB else None
    )
    with pytest.raises(StorageError):
        source.upload(store, name)
    proxy.decide = lambda request: None
    proxy.requests.clear()


def test_a_cut_upload_sends_little_again(proxy, gcs_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 21 * MIB)
    store = open_store(f"{gcs_url}/run", PATIENT)
    cut_upload(proxy, store, source, "step/rank.h5")
    told = []

    source.upload(store, "step/rank.h5", progress=told.append)

    assert nbytes_sent(proxy) < 11 * MIB + PART_NBYTES
    assert sum(told) == 21 * MIB
    assert store.read("step/rank.h5") == source.content
    assert store.abort_leftovers() == 0


def test_parts_are_seen_by_nobody(proxy, gcs_url, tmp_path):
    source = source_file(tmp_path / "rank.h5", 21 * MIB)
    store = open_store(gcs_url, PATIENT)

    cut_upload(proxy, store, source, "step/rank.h5")

    assert list(store.list()) == []
    assert store.directories("step") == []


def test_parts_of_other_bytes_are_not_believed(proxy, gcs_url, tmp_path):
    store = open_store(gcs_url, PATIENT)
    cut_upload(proxy, store, source_file(tmp_path / "other.h5", 21 * MIB, seed=1))
    source = source_file(tmp_path / "rank.h5", 21 * MIB, seed=2)

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content


def test_leftovers_are_removed_by_prefix_and_age(proxy, gcs_url, tmp_path):
    store = open_store(f"{gcs_url}/run", PATIENT)
    source = source_file(tmp_path / "rank.h5", 21 * MIB)
    cut_upload(proxy, store, source, "step-1/rank.h5")
    cut_upload(proxy, store, source, "step-2/rank.h5")

    kept = store.abort_leftovers(older_than_s=3600)
    removed = store.abort_leftovers("step-1/")

    assert (kept, removed) == (0, 1)
    assert store.abort_leftovers() == 1


def test_more_parts_than_one_request_joins(gcs_url, tmp_path):
    options = dataclasses.replace(PATIENT, part_nbytes=MIB // 16)
    store = open_store(gcs_url, options)
    source = source_file(tmp_path / "rank.h5", 4 * MIB + 1)

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content
    assert [file.name for file in store.list()] == ["rank.h5"]
    assert store.abort_leftovers() == 0


def test_a_damaged_source_is_not_joined(gcs_url, tmp_path):
    store = open_store(gcs_url, PATIENT)
    source = source_file(tmp_path / "rank.h5", 11 * MIB)

    with pytest.raises(CorruptShardError):
        source.upload(store, "rank.h5", sha256="0" * 64)

    assert list(store.list()) == []
