"""Copies of checkpoints between directories: whole, durable, once, and for good."""

import errno
import os
import shutil
import threading
import time

import msgspec
import pytest

import mpickpt
from mpickpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
    StorageError,
)
from mpickpt.format.naming import copy_mark_name, temporary_name
from mpickpt.storage import copy_publishing, copy_sweep, copy_to_directory
from mpickpt.storage.copy_sweep import partial_copy, sweep_copies
from mpickpt.storage.copy_target import CopyControl
from mpickpt.storage.copy_to_directory import DirectoryTarget
from mpickpt.storage.copying import (
    copy_checkpoint,
    copy_shards,
    is_published,
    missing_ranks,
    own_ranks,
    publish_copy,
    ranks_in,
)
from mpickpt.storage.sweep import sweep_siblings
from tests.unit.copies import (
    ALL,
    BreaksOff,
    names_of,
    own_names_in,
    require_copy_of,
    require_unpublished,
    rubbish_in,
)
from tests.unit.saved_checkpoint import change_manifest, save

NAME = "step-0000000007"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "elsewhere" / NAME


@pytest.fixture
def manifest(saved):
    return mpickpt.read_manifest(saved)


def test_copy_is_the_same_checkpoint_with_a_manifest_of_its_own(saved, target):
    is_new = copy_checkpoint(saved, target)

    assert is_new
    require_copy_of(saved, target)
    copy, original = mpickpt.read_manifest(target), mpickpt.read_manifest(saved)
    assert copy.manifest_sha256 != original.manifest_sha256
    assert copy.extra["tier"]["kind"] == "directory"
    assert copy.extra["tier"]["url"] == str(target)
    with mpickpt.open_checkpoint(target) as ckpt:
        assert ckpt["shared"][...].sum() > 0


def test_copy_that_is_there_is_left_as_it_is(saved, target):
    copy_checkpoint(saved, target)
    before = {p.name: p.stat().st_ino for p in target.iterdir()}

    is_new = copy_checkpoint(saved, target)

    assert not is_new
    assert {p.name: p.stat().st_ino for p in target.iterdir()} == before


def test_copy_of_a_copy_says_where_it_lies(saved, target, tmp_path):
    copy_checkpoint(saved, target)

    copy_checkpoint(target, tmp_path / "third")

    tier = mpickpt.read_manifest(tmp_path / "third").extra["tier"]
    assert tier["url"] == str(tmp_path / "third")


def test_unknown_fields_of_the_manifest_are_copied_too(copied, target):
    change_manifest(copied, extra={"of_tomorrow": [1]})

    copy_checkpoint(copied, target)

    assert mpickpt.read_manifest(target).extra["of_tomorrow"] == [1]


def test_another_checkpoint_in_the_target_is_never_replaced(saved, target):
    save(target)
    before = (target / "manifest.json").read_bytes()

    with pytest.raises(CheckpointExistsError, match="another checkpoint"):
        copy_checkpoint(saved, target)

    assert (target / "manifest.json").read_bytes() == before


def test_copy_shards_refuses_where_another_checkpoint_is(saved, manifest, target):
    save(target)
    names = own_names_in(target)

    with pytest.raises(CheckpointExistsError):
        copy_shards(manifest, saved, target, [1])

    assert own_names_in(target) == names


def test_one_that_publishes_at_the_same_time_is_not_replaced(
    saved, manifest, target, monkeypatch
):
    copy_shards(manifest, saved, target, ALL)
    other = msgspec.structs.replace(manifest, checkpoint_id="f" * 32)
    content = copy_publishing.dump_manifest(other)
    link = os.link

    def link_late(tmp, final):
        final.write_bytes(content)
        link(tmp, final)

    monkeypatch.setattr(os, "link", link_late)

    with pytest.raises(CheckpointExistsError):
        publish_copy(target, manifest)

    assert (target / "manifest.json").read_bytes() == content


def test_file_system_without_hard_links_gets_a_rename(
    saved, target, manifest, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)

    assert copy_checkpoint(saved, target)
    assert not publish_copy(target, manifest)
    require_copy_of(saved, target)


def test_nothing_is_published_before_all_ranks_are_there(saved, manifest, target):
    copy_shards(manifest, saved, target, [0, 2])

    assert missing_ranks(target, manifest) == [1, 3]
    with pytest.raises(IncompleteCheckpointError, match="ranks 1, 3"):
        publish_copy(target, manifest)
    require_unpublished(target)


def test_ranks_on_several_nodes_make_one_copy(saved, manifest, target):
    for ranks in ([3], [1, 2], [0]):
        copy_shards(manifest, saved, target, ranks)

    assert missing_ranks(target, manifest) == []
    assert publish_copy(target, manifest)
    require_copy_of(saved, target)


def test_layout_file_goes_with_rank_0(saved, manifest, target):
    copy_shards(manifest, saved, target, [0])
    (target / manifest.layout.path).unlink()

    copy_shards(manifest, saved, target, [1, 2, 3])

    assert missing_ranks(target, manifest) == [0]


def test_what_is_there_whole_is_not_copied_again(saved, manifest, target):
    first = copy_shards(manifest, saved, target, [0, 1])
    seen = []

    control = CopyControl(progress=seen.append)
    second = copy_shards(manifest, saved, target, ALL, control=control)

    assert first + second == manifest.nbytes + manifest.layout.nbytes
    assert sum(seen) == manifest.nbytes + manifest.layout.nbytes


def test_file_of_another_size_in_the_target_is_replaced(saved, manifest, target):
    copy_shards(manifest, saved, target, ALL)
    (target / manifest.shards[2].path).write_bytes(b"short")

    assert missing_ranks(target, manifest) == [2]
    copy_checkpoint(saved, target)

    require_copy_of(saved, target)


def test_damaged_file_of_a_published_copy_is_repaired_when_asked(
    saved, manifest, target
):
    copy_checkpoint(saved, target)
    flip_byte_of_shard_of(target, manifest, 1)

    copy_shards(manifest, saved, target, [1], replace=True)

    require_copy_of(saved, target)


def flip_byte_of_shard_of(directory, manifest, rank):
    path = directory / manifest.shards[rank].path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("rank", [0, 2])
def test_damaged_shard_of_the_source_is_named_and_nothing_published(
    copied, manifest, target, rank
):
    path = flip_byte_of_shard_of(copied, manifest, rank)

    with pytest.raises(CorruptShardError) as caught:
        copy_checkpoint(copied, target)

    assert caught.value.path == str(path)
    require_unpublished(target)
    assert manifest.shards[rank].path not in own_names_in(target)
    assert rubbish_in(target, manifest) == []


def test_damaged_layout_file_of_the_source_is_named(copied, manifest, target):
    path = copied / manifest.layout.path
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    with pytest.raises(CorruptShardError, match="layout-"):
        copy_checkpoint(copied, target)

    require_unpublished(target)


def test_missing_shard_of_the_source_is_named(copied, manifest, target):
    (copied / manifest.shards[3].path).unlink()

    with pytest.raises(IncompleteCheckpointError, match="rank00003"):
        copy_checkpoint(copied, target)

    require_unpublished(target)
    assert ranks_in(copied, manifest) == [0, 1, 2]


def test_checkpoint_that_vanishes_is_told_from_a_damaged_one(copied, manifest, target):
    copy_shards(manifest, copied, target, [0, 1])
    shutil.rmtree(copied)

    with pytest.raises(CheckpointNotFoundError, match="removed while it was copied"):
        copy_shards(manifest, copied, target, [2, 3])

    require_unpublished(target)
    assert rubbish_in(target, manifest) == []


def test_checkpoint_that_was_saved_again_is_told_too(copied, manifest, target):
    save(copied, overwrite=True)

    with pytest.raises(CheckpointNotFoundError, match="replaced by another"):
        copy_shards(manifest, copied, target, ALL)

    require_unpublished(target)


def test_damaged_manifest_in_the_target_is_an_error(saved, manifest, target):
    copy_checkpoint(saved, target)
    (target / "manifest.json").write_bytes(b"{}")

    with pytest.raises(ManifestError):
        copy_checkpoint(saved, target)


def test_source_that_is_no_checkpoint_is_an_error(tmp_path, target):
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(tmp_path, target)

    assert not target.exists()


def test_several_files_at_once_make_the_same_copy(saved, target):
    assert copy_checkpoint(saved, target, jobs=3)

    require_copy_of(saved, target)


def test_an_error_of_one_of_several_jobs_is_raised(copied, manifest, target):
    path = flip_byte_of_shard_of(copied, manifest, 2)

    with pytest.raises(CorruptShardError) as caught:
        copy_checkpoint(copied, target, jobs=3)

    assert caught.value.path == str(path)
    require_unpublished(target)


def test_copy_can_be_broken_off(saved, manifest, target):
    control = CopyControl()
    control.cancelled.set()

    with pytest.raises(CheckpointError, match="broken off"):
        copy_checkpoint(saved, target, control=control)

    require_unpublished(target)
    assert rubbish_in(target, manifest) == []


def test_error_half_way_leaves_no_temporary_and_the_next_goes_on(
    saved, manifest, target
):
    half = BreaksOff(manifest.nbytes // 2)

    with pytest.raises(CheckpointError, match="enough"):
        copy_checkpoint(saved, target, control=half.control())

    assert rubbish_in(target, manifest) == []
    assert 0 < len(missing_ranks(target, manifest)) < 4
    copy_checkpoint(saved, target)
    require_copy_of(saved, target)


@pytest.mark.parametrize("small_disk", ["200k"], indirect=True)
def test_full_target_is_an_error_and_room_mends_it(saved, manifest, small_disk):
    target = small_disk / NAME
    filler = small_disk / "filler"
    filler.write_bytes(bytes(150 << 10))

    with pytest.raises(StorageError) as caught:
        copy_checkpoint(saved, target)

    assert caught.value.errno == errno.ENOSPC
    require_unpublished(target)
    filler.unlink()
    copy_checkpoint(saved, target)
    require_copy_of(saved, target)


class Calls:
    """Records syncs, renames, links, by the names that they are made on."""

    def __init__(self, monkeypatch):
        self.log = []
        self._paths = {}
        for name in ("rename", "link"):
            self._wrap(monkeypatch, name)
        fsync = vars(os)["fsync"]

        def record_fsync(descriptor):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.log.append(("fsync", os.path.basename(path)))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", record_fsync)

    def _wrap(self, monkeypatch, name):
        original = getattr(os, name)

        def call(source, target):
            self.log.append((name, os.path.basename(target)))
            original(source, target)

        monkeypatch.setattr(os, name, call)

    def at(self, action, name):
        return next(n for n, c in enumerate(self.log) if c == (action, name))


def test_shards_are_durable_before_their_names_and_these_before_the_manifest(
    saved, manifest, target, monkeypatch
):
    target.parent.mkdir()
    calls = Calls(monkeypatch)

    copy_checkpoint(saved, target)

    published = calls.at("link", "manifest.json")
    for name in names_of(manifest):
        renamed = calls.at("rename", name)
        before = [n for a, n in calls.log[:renamed] if a == "fsync"]
        assert any(n.startswith(f"{name}.") for n in before)
        between = calls.log[renamed:published]
        assert ("fsync", NAME) in between
    assert any(
        a == "fsync" and n.startswith("manifest.json.")
        for a, n in calls.log[:published]
    )
    after = calls.log[published:]
    assert ("fsync", NAME) in after
    assert ("fsync", target.parent.name) in after


def test_published_copy_is_made_durable_again_by_whoever_finds_it(
    saved, target, manifest, monkeypatch
):
    copy_checkpoint(saved, target)
    calls = Calls(monkeypatch)

    publish_copy(target, manifest)

    assert calls.log == [("fsync", NAME), ("fsync", target.parent.name)]


def test_two_copiers_at_once_do_not_disturb_each_other(saved, manifest, target):
    gate = threading.Barrier(2, timeout=20)
    failures, published = [], []

    def copy():
        try:
            gate.wait()
            published.append(copy_checkpoint(saved, target))
        except BaseException as error:
            failures.append(error)

    for _ in range(5):
        threads = [threading.Thread(target=copy) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        require_copy_of(saved, target)
        shutil.rmtree(target)

    assert len(published) == 10


def test_temporary_of_a_living_copier_is_spared(saved, manifest, target):
    writing, go_on = threading.Event(), threading.Event()

    def progress(nbytes):
        writing.set()
        assert go_on.wait(20)

    slow = threading.Thread(
        target=copy_shards,
        args=(manifest, saved, target, [1]),
        kwargs={"control": CopyControl(progress=progress)},
    )
    slow.start()
    assert writing.wait(20)
    [held] = [p for p in target.iterdir() if p.suffix == ".tmp"]

    copy_checkpoint(saved, target)

    assert held.exists()
    go_on.set()
    slow.join()
    assert not held.exists()
    require_copy_of(saved, target)


def test_temporaries_of_dead_copiers_are_swept(saved, manifest, target):
    copy_shards(manifest, saved, target, [0])
    shard = manifest.shards[1].path
    of_here = target / temporary_name(shard, f"{held_machine()}0000")
    of_there = target / temporary_name(shard, "fffff000")
    young_of_there = target / temporary_name(shard, "fffff001")
    for path in (of_here, of_there, young_of_there):
        path.write_bytes(b"part")
    os.utime(of_there, (0, time.time() - 3600))

    copy_checkpoint(saved, target)

    assert not of_here.exists()
    assert not of_there.exists()
    assert young_of_there.exists()


def held_machine():
    from mpickpt.storage import held_temporary

    return held_temporary._machine()


def test_mark_tells_how_far_a_copy_has_come(saved, manifest, target):
    copy_shards(manifest, saved, target, [0, 1])

    copy = partial_copy(target)

    assert copy.nbytes == manifest.nbytes
    assert copy.nbytes_there == sum(s.nbytes for s in manifest.shards[:2])
    copy_checkpoint(saved, target)
    assert partial_copy(target) is None
    assert not (target / copy_mark_name(manifest.checkpoint_id)).exists()


def age(directory, seconds):
    for path in [*directory.rglob("*"), directory]:
        when = path.stat().st_mtime - seconds
        os.utime(path, (when, when))


def test_sweeping_of_a_run_spares_copies_that_are_being_made(saved, manifest, target):
    copy_shards(manifest, saved, target, [0, 1])

    sweep_siblings(target.parent, set())
    sweep_copies(target.parent)

    assert missing_ranks(target, manifest) == [2, 3]


def test_sweeping_takes_copies_that_nobody_went_on_with(saved, manifest, target):
    copy_shards(manifest, saved, target, [0, 1])
    age(target, copy_sweep.STALE_S + 60)
    copy_checkpoint(saved, target.with_name("step-0000000008"))

    sweep_copies(target.parent)

    assert not target.exists()
    require_copy_of(saved, target.with_name("step-0000000008"))


def test_files_that_vanish_while_publishing_withdraw_the_manifest(
    saved, manifest, target, monkeypatch
):
    copy_shards(manifest, saved, target, ALL)
    publish = DirectoryTarget.publish

    def publish_late(self, content):
        (target / manifest.shards[1].path).unlink()
        return publish(self, content)

    monkeypatch.setattr(DirectoryTarget, "publish", publish_late)

    with pytest.raises(IncompleteCheckpointError):
        publish_copy(target, manifest)

    require_unpublished(target)


def test_error_after_the_publishing_is_mended_by_the_same_call(
    saved, manifest, target, monkeypatch
):
    copy_shards(manifest, saved, target, ALL)
    fail = [StorageError("sync failed", errno=errno.EIO, path=str(target))]
    sync = copy_to_directory.sync_directory

    def sync_or_fail(path):
        if (target / "manifest.json").exists() and fail:
            raise fail.pop()
        sync(path)

    monkeypatch.setattr(copy_to_directory, "sync_directory", sync_or_fail)

    with pytest.raises(StorageError, match="sync failed"):
        publish_copy(target, manifest)

    assert not publish_copy(target, manifest)
    require_copy_of(saved, target)


def test_is_published_tells_this_checkpoint_from_none(saved, manifest, target):
    before = is_published(target, manifest)
    copy_checkpoint(saved, target)

    assert (before, is_published(target, manifest)) == (False, True)


def test_own_ranks_leave_to_partners_what_was_saved_on_their_nodes(manifest):
    tier = {"nodes": {"a": [0, 1], "b": [2, 3]}, "copies": {"a": [2]}, "node": "a"}
    local = msgspec.structs.replace(manifest, extra={"tier": tier})

    assert own_ranks(local, [0, 1, 2]) == [0, 1]
    assert own_ranks(manifest, [0, 1, 2]) == [0, 1, 2]


def test_shards_in_subdirectories_are_copied_into_them(saved, manifest, target):
    """As of a world above 1,000 ranks, of which this test has no time to save one."""
    source = target.with_name("large")
    (source / "ranks00001").mkdir(parents=True)
    record = manifest.shards[2]
    moved = msgspec.structs.replace(record, path=f"ranks00001/{record.path}")
    shutil.copy(saved / record.path, source / moved.path)

    DirectoryTarget(target).begin(manifest, source)
    DirectoryTarget(target).take(moved, source, CopyControl())

    assert (target / moved.path).read_bytes() == (saved / record.path).read_bytes()
