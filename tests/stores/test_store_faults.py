"""Stores that are slow, cut, busy, wrong or shut; nothing hangs, nothing is lost."""

import errno
import itertools
import random
import time

import pytest

from mpickpt.errors import StorageError
from mpickpt.storage.stores.opening import open_store
from tests.stores.fault_proxy import Fault, fault_proxy, s3_error
from tests.stores.servers import gcs_environment, s3_environment
from tests.stores.uploads import MIB, PATIENT, QUICK, source_file

SEED = 20261130


@pytest.fixture
def s3_proxy(s3_url, seaweedfs_server, monkeypatch):
    with fault_proxy(seaweedfs_server.port) as proxy:
        for name, value in s3_environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def gcs_proxy(gcs_url, gcs_server, monkeypatch):
    with fault_proxy(gcs_server.port) as proxy:
        for name, value in gcs_environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture(params=["s3", "gcs"])
def proxied(request):
    """A store behind a proxy, and the proxy."""
    proxy = request.getfixturevalue(f"{request.param}_proxy")
    url = request.getfixturevalue(f"{request.param}_url")
    return open_store(f"{url}/run", PATIENT), proxy


def once_in(n, fault):
    """Return a decision: the fault for one request, then n - 1 are left alone."""
    counter = itertools.count()
    return lambda request: None if next(counter) % n else fault


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(s3_error(503, "SlowDown"), id="busy"),
        pytest.param(s3_error(500, "InternalError"), id="internal_error"),
        pytest.param(s3_error(429, "TooManyRequests"), id="too_many"),
        pytest.param(Fault(cut_body_at=0), id="cut_before_the_body"),
        pytest.param(Fault(cut_answer_at=0), id="cut_before_the_answer"),
        pytest.param(Fault(cut_answer_at=30), id="cut_in_the_answer"),
    ],
)
def test_an_upload_gets_through_failing_requests(proxied, tmp_path, fault):
    store, proxy = proxied
    source = source_file(tmp_path / "rank.h5", 11 * MIB)
    proxy.decide = once_in(3, fault)

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content


def test_an_upload_gets_through_cuts_at_random_points(proxied, tmp_path):
    store, proxy = proxied
    source = source_file(tmp_path / "rank.h5", 21 * MIB)
    draw = random.Random(SEED)

    def decide(request):
        if request.method in ("PUT", "POST") and draw.random() < 0.3:
            return Fault(cut_body_at=draw.randrange(5 * MIB))
        return None

    proxy.decide = decide

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content


def test_a_read_goes_on_where_it_was_cut(s3_proxy, s3_url, tmp_path):
    store = open_store(s3_url, PATIENT)
    source = source_file(tmp_path / "rank.h5", 4 * MIB)
    source.upload(store, "rank.h5")
    s3_proxy.decide = lambda request: Fault(cut_answer_at=MIB)
    view = bytearray(3 * MIB)

    n = store.read_into("rank.h5", memoryview(view), MIB)

    assert n == len(view)
    assert view == source.content[MIB:]


def test_an_answer_that_ends_early_is_never_taken_for_the_whole(proxied, tmp_path):
    store, proxy = proxied
    source = source_file(tmp_path / "rank.h5", MIB)
    source.upload(store, "rank.h5")
    view = bytearray(MIB)

    proxy.decide = once_in(1000, Fault(cut_answer_at=MIB // 2))
    whole = store.read("rank.h5")
    proxy.decide = once_in(1000, Fault(cut_answer_at=MIB // 2))
    n = store.read_into("rank.h5", memoryview(view))

    assert whole == source.content
    assert (n, bytes(view)) == (MIB, source.content)


def test_an_answer_cut_in_its_headers_is_never_taken_for_nothing(proxied, tmp_path):
    store, proxy = proxied
    store.put("file", b"content")

    def after_a_cut_answer(ask):
        proxy.decide = once_in(1000, Fault(cut_answer_at=30))
        return ask()

    assert after_a_cut_answer(lambda: store.read("file")) == b"content"
    assert after_a_cut_answer(lambda: store.stat("file")).nbytes == 7
    assert [f.name for f in after_a_cut_answer(lambda: [*store.list()])] == ["file"]
    after_a_cut_answer(lambda: store.put("file", b"other"))
    assert store.read("file") == b"other"
    after_a_cut_answer(lambda: store.delete(["file"]))
    assert store.stat("file") is None


def test_put_new_knows_its_own_file_when_the_answer_is_lost(proxied):
    store, proxy = proxied
    store.check_conditions()
    proxy.decide = once_in(1000, Fault(cut_answer_at=0))

    assert store.put_new("manifest.json", b"mine")
    assert not store.put_new("manifest.json", b"mine")


def test_bytes_damaged_on_the_way_are_sent_again(proxied, tmp_path):
    store, proxy = proxied
    source = source_file(tmp_path / "rank.h5", 11 * MIB)
    proxy.decide = lambda request: (
        Fault(flips=True)
        if request.nbytes == 0 and len(proxy.requests) in (3, 5)
        else None
    )

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content


def test_a_path_that_damages_all_is_an_error_and_nothing_is_there(s3_proxy, s3_url):
    store = open_store(s3_url, PATIENT)
    s3_proxy.decide = lambda request: Fault(flips=request.method == "PUT")

    with pytest.raises(StorageError, match="BadDigest") as failure:
        open_store(s3_url, QUICK).put("manifest.json", b"content")

    s3_proxy.decide = lambda request: None
    assert failure.value.errno == errno.EIO
    assert store.stat("manifest.json") is None


def test_a_silent_store_is_given_up_in_time(proxied):
    store, proxy = proxied
    proxy.decide = lambda request: Fault(is_silent=True)
    began = time.monotonic()

    with pytest.raises(StorageError, match="does not answer") as failure:
        open_store(store.url, QUICK).put("manifest.json", b"content")

    assert failure.value.errno == errno.ETIMEDOUT
    assert time.monotonic() - began < 20.0


def test_nobody_listens_is_given_up_in_time(proxied, monkeypatch):
    store, proxy = proxied
    with fault_proxy(proxy.upstream) as other:
        nowhere = other.endpoint
    monkeypatch.setenv("AWS_ENDPOINT_URL", nowhere)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", nowhere)

    with pytest.raises(StorageError) as failure:
        open_store(store.url, QUICK).put("manifest.json", b"content")

    assert failure.value.errno in (errno.EIO, errno.ETIMEDOUT)


def test_a_slow_store_is_waited_for(proxied):
    store, proxy = proxied
    store.put("manifest.json", bytes(4096))
    proxy.decide = lambda request: Fault(pause_s=0.2)

    assert store.read("manifest.json") == bytes(4096)


def test_expired_credentials_are_said_at_once(s3_proxy, s3_url, tmp_path):
    store = open_store(s3_url, PATIENT)
    s3_proxy.decide = lambda request: s3_error(400, "ExpiredToken")

    with pytest.raises(StorageError, match="expired: renew") as failure:
        source_file(tmp_path / "rank.h5", 11 * MIB).upload(store, "rank.h5")

    assert failure.value.errno == errno.EACCES
    assert failure.value.path == f"{s3_url}/rank.h5"
    # A HEAD tells no reason: boto3 asks for the region, and we for the reason.
    assert [request.method for request in s3_proxy.requests] == ["HEAD", "HEAD", "GET"]


def test_credentials_that_expire_in_mid_upload_lose_nothing(s3_proxy, s3_url, tmp_path):
    store = open_store(s3_url, PATIENT)
    source = source_file(tmp_path / "rank.h5", 21 * MIB)
    s3_proxy.decide = lambda request: (
        s3_error(403, "ExpiredToken") if s3_proxy.nbytes_of_parts > 12 * MIB else None
    )
    with pytest.raises(StorageError):
        source.upload(store, "rank.h5")
    s3_proxy.requests.clear()
    s3_proxy.decide = lambda request: None

    source.upload(store, "rank.h5")

    assert store.read("rank.h5") == source.content
    assert s3_proxy.nbytes_of_parts <= 16 * MIB


def test_a_refusal_is_not_tried_again(proxied):
    store, proxy = proxied
    proxy.decide = lambda request: s3_error(403, "AccessDenied")

    with pytest.raises(StorageError, match="credentials") as failure:
        store.put("manifest.json", b"content")

    assert failure.value.errno == errno.EACCES
    assert sum(request.method != "GET" for request in proxy.requests) == 1


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_a_bucket_that_is_missing_is_enoent(request, kind):
    url = request.getfixturevalue(f"{kind}_url")
    store = open_store(f"{url}-is-not-there/run", PATIENT)

    with pytest.raises(StorageError, match="bucket") as failure:
        store.put("manifest.json", b"content")

    assert failure.value.errno == errno.ENOENT
    with pytest.raises(StorageError, match="-is-not-there"):
        list(store.list())
