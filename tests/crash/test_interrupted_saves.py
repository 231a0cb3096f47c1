"""Saves into what others left; replaces checkpoints under their readers."""

import errno
import json
import shutil
import threading
from pathlib import Path

import pytest

from mpickpt import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PerRank,
    StateTypeError,
    StorageError,
    open_checkpoint,
    read_manifest,
    save_sharded,
)
from mpickpt.parallel import load as load_module
from mpickpt.storage import commit
from mpickpt.storage.verification import verify_checkpoint
from tests.crash.small_state import (
    files_named_by_manifest,
    files_of,
    flat,
    require_loads,
    save,
    state_of,
    try_load,
    try_save,
)
from tests.mpi_launch import finish, start
from tests.ranks_as_threads import run_ranks

SIZE = 3
OLD, NEW, AFTER = 1, 2, 3
PROGRAM = str(Path(__file__).parent / "programs" / "save_and_die.py")

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed"
)


def kill_before_publishing(path):
    """Have rank 0 killed when it is about to rename the manifest."""
    fault = {"rank": 0, "inject": "rename:signal=SIGKILL:when=1", "threads": False}
    outcome = finish(start([PROGRAM, str(path), json.dumps(fault)], size=SIZE), 120)
    assert not outcome.timed_out, outcome.output
    assert outcome.returncode != 0, "nobody was killed"


def require_only_the_checkpoint(path):
    """Assert that the directory holds a whole checkpoint and nothing else."""
    assert files_of(path) == files_named_by_manifest(path)
    assert verify_checkpoint(path).is_whole


@needs_strace
def test_another_number_of_ranks_saves_into_what_a_crash_left(tmp_path):
    path = tmp_path / "checkpoint"
    kill_before_publishing(path)
    assert len(files_of(path)) > SIZE

    save(path, step=AFTER, size=2)

    require_loads(path, step=AFTER, size=2)
    require_only_the_checkpoint(path)


def test_files_of_others_survive_a_sweep(tmp_path):
    path = tmp_path / "checkpoint"
    path.mkdir()
    theirs = {"notes.txt", "rank00000.h5", "rank00000-xyz.h5", "layout.h5", "a/b.h5"}
    for name in theirs:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("theirs")
    for name in ("rank00007-0123abcd.h5", "rank00001-0123abcd.h5.tmp"):
        (path / name).write_text("rubbish of a crash")

    save(path, step=NEW, size=2)

    assert files_of(path) == files_named_by_manifest(path) | theirs


def test_save_refuses_published_checkpoint(tmp_path):
    save(tmp_path / "checkpoint", step=OLD)
    before = {path: path.stat() for path in (tmp_path / "checkpoint").iterdir()}

    outcomes = try_save(tmp_path / "checkpoint", step=NEW)

    assert {type(outcome) for outcome in outcomes} == {CheckpointExistsError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert str(tmp_path / "checkpoint") in str(outcomes[0])
    assert {p: p.stat() for p in (tmp_path / "checkpoint").iterdir()} == before
    require_loads(tmp_path / "checkpoint", step=OLD)


@pytest.mark.parametrize("damage", ["manifest", "newer schema", "shard"])
def test_save_refuses_damaged_checkpoint_unless_overwriting(tmp_path, damage):
    path = tmp_path / "checkpoint"
    save(path, step=OLD)
    if damage == "manifest":
        (path / "manifest.json").write_bytes(b"torn")
    elif damage == "newer schema":
        (path / "manifest.json").write_bytes(b'{"schema_version": 2}')
    else:
        (path / read_manifest(path).shards[0].path).unlink()
    before = files_of(path)

    outcomes = try_save(path, step=NEW)

    assert {type(outcome) for outcome in outcomes} == {CheckpointExistsError}
    assert files_of(path) == before
    save(path, step=NEW, overwrite=True)
    require_loads(path, step=NEW)
    require_only_the_checkpoint(path)


@pytest.mark.parametrize("sizes", [(4, 4), (4, 2), (2, 4)], ids=str)
def test_old_checkpoint_loads_until_the_new_one_is_published(
    tmp_path, monkeypatch, sizes
):
    old_size, new_size = sizes
    path = tmp_path / "checkpoint"
    save(path, step=OLD, size=old_size)
    old_files, seen, rename = files_of(path), [], commit.rename

    def look_and_rename(source, target):
        if Path(target).name == "manifest.json":
            require_loads(path, step=OLD, size=old_size)
            seen.append(files_of(path))
        rename(source, target)

    monkeypatch.setattr(commit, "rename", look_and_rename)
    save(path, step=NEW, size=new_size, overwrite=True)

    monkeypatch.undo()

    assert old_files < seen[0]
    require_loads(path, step=NEW, size=new_size)
    require_only_the_checkpoint(path)
    gone = {name for name in old_files if name.startswith("rank")}
    assert not gone & files_of(path)


@pytest.mark.parametrize("manner", ["new", "overwriting"])
@pytest.mark.parametrize("failing", ["rank00001", "layout", "manifest"])
def test_failed_save_removes_what_it_wrote(tmp_path, monkeypatch, manner, failing):
    path = tmp_path / "checkpoint"
    if manner == "overwriting":
        save(path, step=OLD)
    before, rename = files_of(path), commit.rename

    def fail_or_rename(source, target):
        if Path(target).name.startswith(failing):
            raise StorageError("no more", errno=errno.EIO, path=str(source))
        rename(source, target)

    monkeypatch.setattr(commit, "rename", fail_or_rename)
    outcomes = try_save(path, step=NEW, overwrite=manner == "overwriting")
    monkeypatch.undo()

    assert {type(outcome) for outcome in outcomes} == {StorageError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert {outcome.errno for outcome in outcomes} == {errno.EIO}
    assert files_of(path) == before
    assert path.exists() == (manner == "overwriting")
    save(path, step=AFTER, overwrite=True)
    require_only_the_checkpoint(path)


def test_save_that_one_rank_cannot_describe_makes_no_directory(tmp_path):
    path = tmp_path / "checkpoint"

    def save_rank(comm):
        tree = {"x": PerRank(object() if comm.rank == 2 else 1)}
        return save_sharded(tree, path, step=1, comm=comm)

    outcomes = run_ranks(4, save_rank)

    assert {type(outcome) for outcome in outcomes} == {StateTypeError}
    assert {outcome.rank for outcome in outcomes} == {2}
    assert not path.exists()


def replacing_once(monkeypatch, change):
    """Have rank 0 of the next load see the checkpoint change after its first look."""
    read, changed = load_module.read_manifest_text, []

    def read_and_change(path):
        text = read(path)
        if not changed:
            changed.append(True)
            change()
        return text

    monkeypatch.setattr(load_module, "read_manifest_text", read_and_change)
    return changed


def test_load_tries_again_when_the_checkpoint_is_replaced(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    save(path, step=OLD)
    changed = replacing_once(monkeypatch, lambda: save(path, step=NEW, overwrite=True))

    require_loads(path, step=NEW)

    assert changed


def test_load_tries_again_when_shards_go_while_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    save(path, step=OLD)
    fetch, lock, changed = load_module.Fetch, threading.Lock(), []

    def replace_and_fetch(*arguments, **options):
        with lock:
            if not changed:
                changed.append(True)
                save(path, step=NEW, overwrite=True)
        return fetch(*arguments, **options)

    monkeypatch.setattr(load_module, "Fetch", replace_and_fetch)

    require_loads(path, step=NEW)

    assert changed


def test_load_refuses_other_world_size_when_replaced_by_it(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    save(path, step=OLD)
    replacing_once(monkeypatch, lambda: save(path, step=NEW, size=2, overwrite=True))

    outcomes = try_load(path)

    assert {type(outcome).__name__ for outcome in outcomes} == {
        "WorldSizeMismatchError"
    }


def test_load_says_not_found_when_the_checkpoint_is_deleted(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    save(path, step=OLD)
    replacing_once(monkeypatch, lambda: shutil.rmtree(path))

    outcomes = try_load(path)

    assert {type(outcome) for outcome in outcomes} == {CheckpointNotFoundError}


def test_load_gives_up_when_the_same_manifest_stays(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    save(path, step=OLD)
    shard = path / read_manifest(path).shards[1].path
    replacing_once(monkeypatch, shard.unlink)

    outcomes = try_load(path)

    assert {type(outcome) for outcome in outcomes} == {IncompleteCheckpointError}
    assert {outcome.path for outcome in outcomes} == {str(shard)}


def test_open_checkpoint_goes_on_when_the_checkpoint_is_replaced(tmp_path):
    path = tmp_path / "checkpoint"
    save(path, step=OLD)

    with open_checkpoint(path) as opened:
        assert opened["step"] == OLD
        save(path, step=NEW, overwrite=True)
        whole = opened.load("model/w")
        assert opened["step"] == NEW

    parts = [state_of(rank, NEW)["model"]["w"].data for rank in range(4)]
    assert whole.tobytes() == b"".join(part.tobytes() for part in parts)


def test_readers_never_see_a_mixture_while_checkpoints_are_replaced(tmp_path):
    path = tmp_path / "checkpoint"
    save(path, step=OLD)
    over = threading.Event()
    failures = []

    def read():
        while not over.is_set():
            for rank, outcome in enumerate(try_load(path)):
                if isinstance(outcome, BaseException):
                    failures.append(outcome)
                elif flat(outcome) != flat(state_of(rank, outcome["step"])):
                    failures.append((rank, outcome["step"]))

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(2, 10):
        save(path, step=step, overwrite=True)
    over.set()
    reader.join()

    assert failures == []
    require_only_the_checkpoint(path)
