"""What every store does, whatever it is made of."""

import errno
import hashlib
import secrets
import threading

import pytest

from mpickpt.errors import CorruptShardError, IncompleteCheckpointError, StorageError
from mpickpt.storage.stores.opening import open_store
from mpickpt.storage.stores.store import StoreOptions

MIB = 1 << 20
OPTIONS = StoreOptions(part_nbytes=5 * MIB, retry_for_s=3.0, read_timeout_s=10.0)


@pytest.fixture(params=["directory", "s3", "lax_s3", "gcs", "memory"])
def store(request, tmp_path):
    if request.param == "directory":
        return open_store(tmp_path / "store", OPTIONS)
    if request.param == "memory":
        return open_store(f"memory://bucket-{secrets.token_hex(4)}/run", OPTIONS)
    url = request.getfixturevalue(f"{request.param}_url")
    return open_store(f"{url}/some/run", OPTIONS)


@pytest.fixture
def source(tmp_path):
    content = secrets.token_bytes(11 * MIB + 7)
    path = tmp_path / "rank00000-0123abcd.h5"
    path.write_bytes(content)
    return path


def digest_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def upload(store, name, source, **how):
    size, sha256 = source.stat().st_size, digest_of(source)
    store.upload(name, source, **({"nbytes": size, "sha256": sha256} | how))


def test_put_replaces_what_was_there(store):
    store.put("a/manifest.json", b"one")
    store.put("a/manifest.json", b"two")

    assert store.read("a/manifest.json") == b"two"


def test_put_new_keeps_what_was_there(store):
    contents = (b"1", b"2", b"1")

    answers = [store.put_new("manifest.json", content) for content in contents]

    assert answers == [True, False, False]
    assert store.read("manifest.json") == b"1"


def test_read_gives_the_bytes_of_a_range(store):
    store.put("file", bytes(range(100)))
    view = bytearray(10)

    assert store.read("file", 10, 5) == bytes(range(10, 15))
    assert store.read("file", 90) == bytes(range(90, 100))
    assert store.read("file", 95, 50) == bytes(range(95, 100))
    assert store.read("file", 0, 0) == b""
    assert store.read_into("file", memoryview(view), 93) == 7
    assert view[:7] == bytes(range(93, 100))


def test_read_after_the_end_gives_nothing(store):
    store.put("file", b"abc")

    assert store.read("file", 3, 10) == b""
    assert store.read_into("file", memoryview(bytearray(4)), 8) == 0


def test_empty_files_are_files(store):
    store.put("empty", b"")

    assert store.read("empty") == b""
    assert store.stat("empty").nbytes == 0


def test_read_of_what_is_not_there_is_enoent(store):
    with pytest.raises(StorageError, match="nothing-here") as failure:
        store.read("nothing-here", 0, 10)

    assert failure.value.errno == errno.ENOENT
    assert store.stat("nothing-here") is None


def test_list_is_recursive_and_directories_are_one_level(store):
    for name in ("b/two", "b/deep/three", "one", "b-c/four"):
        store.put(name, name.encode())

    assert sorted(file.name for file in store.list()) == [
        "b-c/four",
        "b/deep/three",
        "b/two",
        "one",
    ]
    assert sorted(file.name for file in store.list("b/")) == ["b/deep/three", "b/two"]
    assert {file.name: file.nbytes for file in store.list("one")} == {"one": 3}
    assert store.directories() == ["b", "b-c"]
    assert store.directories("b") == store.directories("b/") == ["b/deep"]
    assert store.directories("none") == []


def test_delete_takes_files_that_are_there_and_that_are_not(store):
    store.put("a/one", b"1")
    store.put("a/two", b"2")

    store.delete(["a/one", "a/none"])

    assert [file.name for file in store.list()] == ["a/two"]


def test_upload_gives_the_same_bytes_back(store, source):
    told = []

    upload(store, "step/rank.h5", source, progress=told.append)

    assert store.read("step/rank.h5") == source.read_bytes()
    assert store.stat("step/rank.h5").sha256 in (None, digest_of(source))
    assert sum(told) == source.stat().st_size
    assert [file.name for file in store.list()] == ["step/rank.h5"]


def test_upload_of_an_empty_file(store, tmp_path):
    source = tmp_path / "empty"
    source.write_bytes(b"")

    upload(store, "empty", source)

    assert store.stat("empty").nbytes == 0


def test_upload_refuses_a_source_of_another_digest(store, source):
    with pytest.raises(CorruptShardError, match=source.name) as failure:
        upload(store, "rank.h5", source, sha256="0" * 64)

    assert failure.value.actual == digest_of(source)
    assert store.stat("rank.h5") is None


def test_upload_refuses_a_source_of_another_size(store, source):
    with pytest.raises(IncompleteCheckpointError, match=source.name):
        upload(store, "rank.h5", source, nbytes=source.stat().st_size + 1)

    assert store.stat("rank.h5") is None


def test_upload_ends_when_it_is_cancelled(store, source):
    cancelled = threading.Event()
    cancelled.set()

    with pytest.raises(StorageError) as failure:
        upload(store, "rank.h5", source, cancelled=cancelled)

    assert failure.value.errno == errno.ECANCELED
    assert store.stat("rank.h5") is None


def test_upload_asks_for_every_byte_that_it_sends(store, source):
    asked = []

    class Pace:
        def take(self, nbytes):
            asked.append(nbytes)

    upload(store, "rank.h5", source, pace=Pace())

    assert sum(asked) == source.stat().st_size
    assert max(asked) <= MIB


def test_names_stay_inside_the_store(store):
    for name in ("../x", "/x", "a//b", "", "a/./b", "nul\0"):
        with pytest.raises(ValueError, match="not the name"):
            store.put(name, b"")


def test_names_may_hold_what_urls_may_not(store):
    name = "step-0000000001/%2F a+b?c#d=é.h5"

    store.put(name, b"x")

    assert store.read(name) == b"x"
    assert [file.name for file in store.list("step-0000000001/")] == [name]


def test_check_conditions_tells_what_the_store_does(store, request):
    expected = request.node.callspec.params["store"] not in ("lax_s3", "memory")

    assert store.check_conditions() is expected
    assert list(store.list()) == []


def test_one_of_several_writers_wins_where_conditions_are_honoured(store):
    if not store.check_conditions():
        pytest.skip("this store ignores conditions")
    won = []
    start = threading.Barrier(8)

    def write(number):
        start.wait(10)
        if store.put_new("manifest.json", b"%d" % number):
            won.append(number)

    writers = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert len(won) == 1
    assert store.read("manifest.json") == b"%d" % won[0]
