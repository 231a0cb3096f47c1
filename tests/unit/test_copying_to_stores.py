"""What copying asks of a store, and sweeps there; against a store in memory."""

import errno

import msgspec
import pytest

import mpickpt
from mpickpt.errors import CheckpointExistsError, StorageError
from mpickpt.format.manifest import dump_manifest
from mpickpt.format.naming import copy_mark_name
from mpickpt.storage import copy_sweep
from mpickpt.storage.copy_sweep import partial_copy, sweep_copies
from mpickpt.storage.copying import copy_checkpoint, copy_shards, publish_copy
from mpickpt.storage.remote_path import RemotePath
from tests.stores_double import URL, memory_store
from tests.unit.copies import ALL

RUN = RemotePath(f"{URL}/run")
TARGET = RUN / "step-0000000007"


@pytest.fixture
def store(monkeypatch):
    return memory_store(monkeypatch)


@pytest.fixture
def manifest(saved):
    return mpickpt.read_manifest(saved)


def names_in(store, directory=TARGET):
    prefix = str(directory).removeprefix(f"{URL}/") + "/"
    return sorted(n.removeprefix(prefix) for n in store.files if n.startswith(prefix))


def test_each_rank_asks_little(saved, manifest, store):
    copy_shards(manifest, saved, TARGET, [0])
    store.asked.clear()

    copy_shards(manifest, saved, TARGET, [1])

    assert store.asked["list"] == 0
    assert sum(store.asked.values()) <= 4


def test_mark_tells_how_far_a_copy_has_come_and_goes_at_the_end(saved, manifest, store):
    copy_shards(manifest, saved, TARGET, [1, 2])
    copy = partial_copy(TARGET)
    copy_checkpoint(saved, TARGET)

    assert copy.nbytes == manifest.nbytes
    assert copy.nbytes_there == manifest.shards[1].nbytes + manifest.shards[2].nbytes
    assert partial_copy(TARGET) is None
    assert copy_mark_name(manifest.checkpoint_id) not in names_in(store)


def test_store_that_ignores_conditions_shows_who_published(
    saved, manifest, store, monkeypatch
):
    other = dump_manifest(msgspec.structs.replace(manifest, checkpoint_id="f" * 32))
    copy_shards(manifest, saved, TARGET, ALL)

    def put_late(name, content):
        store.put(name, content)
        store.put(name, other)  # at the same time, and last
        return True

    monkeypatch.setattr(store, "put_new", put_late)
    monkeypatch.setattr(store, "check_conditions", lambda: False)

    with pytest.raises(CheckpointExistsError):
        publish_copy(TARGET, manifest)


def test_objects_that_vanish_while_publishing_withdraw_the_manifest(
    saved, manifest, store, monkeypatch
):
    copy_shards(manifest, saved, TARGET, ALL)
    put_new = store.put_new

    def put_late(name, content):
        store.delete([f"run/step-0000000007/{manifest.shards[1].path}"])
        return put_new(name, content)

    monkeypatch.setattr(store, "put_new", put_late)

    with pytest.raises(mpickpt.CheckpointError):
        publish_copy(TARGET, manifest)

    assert "manifest.json" not in names_in(store)


def test_sweep_takes_copies_that_nobody_went_on_with(saved, manifest, store):
    copy_shards(manifest, saved, TARGET, [0, 1])
    for name in store.files:
        store.modified_s[name] -= copy_sweep.STALE_S + 60
    young = RUN / "step-0000000008"
    copy_shards(manifest, saved, young, [0, 1])
    copy_checkpoint(saved, RUN / "step-0000000009")
    store.put("run/step-0000000007/of-others.txt", b"")

    sweep_copies(RUN)

    assert names_in(store) == ["of-others.txt"]
    assert len(names_in(store, young)) == 4
    assert "manifest.json" in names_in(store, RUN / "step-0000000009")


def test_sweep_leaves_a_run_that_is_refused(store, caplog):
    store.refuse = errno.EACCES

    sweep_copies(RUN)

    assert "was not swept" in caplog.text


def test_refusal_of_the_store_is_an_error(saved, store):
    store.refuse = errno.EACCES

    with pytest.raises(StorageError) as caught:
        copy_checkpoint(saved, TARGET)

    assert caught.value.errno == errno.EACCES
