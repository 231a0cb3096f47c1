"""Fails system calls of one rank: all raise the same error, nothing old is harmed."""

import errno
import fcntl
import json
import os
import shutil
import time
from functools import cache
from pathlib import Path

import pytest

from mpickpt import SaveOptions
from tests.crash.small_state import (
    files_named_by_manifest,
    files_of,
    require_loads,
    save,
)
from tests.mpi_launch import finish, pythons, start

SIZE = 4
N_FILES = SIZE + 3  # shards, manifest, layout, receipts
SECONDS = 20.0
PROGRAMS = Path(__file__).parent / "programs"
MANIFEST_TMP = "{path}/manifest.json.tmp"


def fault(action, rank, inject, *, threads=True, path=None):
    return {
        "action": action,
        "fault": {"rank": rank, "inject": inject, "threads": threads, "path": path},
    }


def save_fault(inject, *, rank=2):
    """Of the thread that writes a shard, or of those below it."""
    return fault("save", rank, inject)


def publish_fault(inject, *, action="save", path=None):
    """Of rank 0's main thread, which makes the directory and publishes."""
    return fault(action, 0, inject, threads=False, path=path)


# What one rank's file system refuses while shards are written.
SHARD_FAULTS = {
    "ENOSPC at the first write of each thread": save_fault(
        "pwrite64:error=ENOSPC:when=1"
    ),
    "ENOSPC at the second write of each thread": save_fault(
        "pwrite64:error=ENOSPC:when=2"
    ),
    "EIO at every write": save_fault("pwrite64:error=EIO"),
    "EDQUOT at a write": save_fault("pwrite64:error=EDQUOT:when=2"),
    "ESTALE at a write": save_fault("pwrite64:error=ESTALE:when=1"),
    "ENOSPC at the sync of the shard": save_fault("fsync:error=ENOSPC:when=1"),
    "EIO at the sync of the shard": save_fault("fsync:error=EIO:when=1"),
    "EDQUOT at the sync of the shard": save_fault("fsync:error=EDQUOT:when=1"),
    "EIO at the sync of the directory": save_fault("fsync:error=EIO:when=2"),
    "EIO at the rename of the shard": save_fault("rename:error=EIO:when=1"),
    "EDQUOT at the rename of the shard": save_fault("rename:error=EDQUOT:when=1"),
    "EIO at a write of rank 0": save_fault("pwrite64:error=EIO:when=1", rank=0),
    "EIO at the sync of the layout file": save_fault("fsync:error=EIO:when=3", rank=0),
    "ENOSPC at the rename of the layout file": save_fault(
        "rename:error=ENOSPC:when=2", rank=0
    ),
}

# What rank 0's file system refuses around the manifest. Syncs of its main thread, in
# order: the parent of the new directory, the directory before the manifest, the
# manifest, the directory after the rename, the parent.
MANIFEST_FAULTS = {
    "ENOSPC at mkdir": publish_fault("mkdir:error=ENOSPC"),
    "EIO at the sync of the new directory": publish_fault("fsync:error=EIO:when=1"),
    "EIO at the sync before the manifest": publish_fault("fsync:error=EIO:when=2"),
    "EDQUOT at the opening of the manifest": publish_fault(
        "openat:error=EDQUOT", path=MANIFEST_TMP
    ),
    "EIO at the write of the receipts": publish_fault("write:error=EIO:when=1"),
    "ENOSPC at the write of the manifest": publish_fault(
        "write:error=ENOSPC", path=MANIFEST_TMP
    ),
    "EIO at the sync of the manifest": publish_fault("fsync:error=EIO:when=3"),
    "EIO at the rename of the manifest": publish_fault("rename:error=EIO:when=1"),
    "ENOSPC at the rename of the manifest": publish_fault("rename:error=ENOSPC:when=1"),
    "EIO at the sync after the rename": publish_fault("fsync:error=EIO:when=4"),
    "EIO at the sync of the parent": publish_fault("fsync:error=EIO:when=5"),
}

# The same where a published checkpoint is replaced: there is no new directory.
OVERWRITE_FAULTS = {
    "overwriting, EIO at a write": fault("overwrite", 2, "pwrite64:error=EIO:when=2"),
    "overwriting, EIO at the sync of the shard": fault(
        "overwrite", 2, "fsync:error=EIO:when=1"
    ),
    "overwriting, ENOSPC at the write of the manifest": publish_fault(
        "write:error=ENOSPC", action="overwrite", path=MANIFEST_TMP
    ),
    "overwriting, EIO at the rename of the manifest": publish_fault(
        "rename:error=EIO:when=1", action="overwrite"
    ),
    "overwriting, EIO at the sync after the rename": publish_fault(
        "fsync:error=EIO:when=3", action="overwrite"
    ),
}

UNKNOWN_FAULTS = {
    "EIO at every sync after the rename": publish_fault("fsync:error=EIO:when=4+"),
}

TOLERATED_FAULTS = {
    "interrupted writes": save_fault("pwrite64:error=EINTR:when=1..3"),
    "a removal of old shards that fails": publish_fault(
        "unlink:error=EIO:when=2", action="overwrite"
    ),
}

LOAD_FAULTS = {
    "EIO at a read": fault("load", 2, "/preadv2?:error=EIO:when=1"),
    "EIO at every read": fault("load", 1, "/preadv2?:error=EIO"),
    "ESTALE at every read": fault("load", 2, "/preadv2?:error=ESTALE"),
    "EIO at a read of the manifest": fault(
        "load", 0, "/preadv2?:error=EIO:when=1", path="{path}/manifest.json"
    ),
    "EACCES at the manifest": fault(
        "load", 0, "openat:error=EACCES", path="{path}/manifest.json"
    ),
}

FAILING = SHARD_FAULTS | MANIFEST_FAULTS | OVERWRITE_FAULTS
FEW = (
    "EIO at every write",
    "EIO at the sync of the shard",
    "ENOSPC at the write of the manifest",
    "EIO at the sync after the rename",
    "overwriting, EIO at the rename of the manifest",
    "EIO at every read",
)
ALL_FAULTS = FAILING | UNKNOWN_FAULTS | TOLERATED_FAULTS | LOAD_FAULTS

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed"
)


def case_of(name, run):
    case = json.loads(json.dumps(ALL_FAULTS[name])) | {"name": name.replace(" ", "-")}
    path = case["fault"]["path"]
    case["fault"]["path"] = path and path.format(path=run / case["name"])
    return case


def on_each_python(names):
    """Parametrise by interpreter and fault; under a second MPI some faults do."""
    first, *others = pythons()
    pairs = [(first, name) for name in names]
    pairs += [(python, name) for python in others for name in names if name in FEW]
    return pytest.mark.parametrize(
        ("python", "name"),
        [pytest.param(p, n, id=f"{Path(p).parts[-3]}-{n}") for p, n in pairs],
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the ranks of one MPI program said of each fault, one after the other."""
    folder = tmp_path_factory.mktemp("faults")

    @cache
    def run_program(python):
        run = folder / Path(python).parts[-3]
        run.mkdir()
        names = ALL_FAULTS if python == pythons()[0] else FEW
        (run / "cases.json").write_text(json.dumps([case_of(n, run) for n in names]))
        arguments = [PROGRAMS / "save_under_faults.py", run, run / "cases.json"]
        program = start([*map(str, arguments)], size=SIZE, python=python)
        return run, finish(program, 240).output

    def said_of(python, name):
        run, output = run_program(python)
        path = run / f"{case_of(name, run)['name']}.json"
        assert path.exists(), f"the program ended before:\n{output[-5000:]}"
        return json.loads(path.read_text())

    return said_of


def errno_of(name):
    return getattr(
        errno, ALL_FAULTS[name]["fault"]["inject"].split("=")[1].split(":")[0]
    )


def require_hit(name, ranks):
    assert ranks[ALL_FAULTS[name]["fault"]["rank"]]["hits"], "strace failed no call"


def require_same_error(name, ranks):
    failing = ALL_FAULTS[name]["fault"]["rank"]
    assert {rank["class"] for rank in ranks} == {"StorageError"}
    assert len({rank["text"] for rank in ranks}) == 1
    assert {rank["rank"] for rank in ranks} == {failing}
    assert {rank["host"] for rank in ranks} == {ranks[failing]["host here"]}
    assert {rank["errno"] for rank in ranks} == {errno_of(name)}
    assert all(rank["path"] and rank["path"] in rank["text"] for rank in ranks)
    assert all(rank["failing"] == [failing] for rank in ranks)
    assert max(rank["seconds"] for rank in ranks) < SECONDS


def require_goes_on(ranks):
    """Assert that what was there loads, and that the same save then succeeds."""
    assert {rank["load previous"].get("value") for rank in ranks} == {0}
    assert {rank["again"]["class"] for rank in ranks} == {None}
    assert {rank["load again"].get("value") for rank in ranks} == {3}
    names = {name.rpartition("-")[0] for name in ranks[0]["files again"]}
    assert len(ranks[0]["files again"]) == N_FILES
    shards = {f"rank{rank:05d}" for rank in range(SIZE)}
    assert names == {"", "layout", "receipts"} | shards


@needs_strace
@on_each_python(FAILING)
def test_save_raises_the_same_error_on_all_ranks(said, python, name):
    ranks = said(python, name)

    require_hit(name, ranks)
    require_same_error(name, ranks)
    assert {rank["outcome"] for rank in ranks} == {None}


@needs_strace
@on_each_python([*SHARD_FAULTS, *MANIFEST_FAULTS])
def test_failed_save_leaves_nothing(said, python, name):
    ranks = said(python, name)

    assert ranks[0]["files after"] == []
    assert {r["load after"]["class"] for r in ranks} == {"CheckpointNotFoundError"}
    require_goes_on(ranks)


@needs_strace
@on_each_python(OVERWRITE_FAULTS)
def test_failed_overwriting_leaves_the_old_checkpoint(said, python, name):
    ranks = said(python, name)

    assert len(ranks[0]["files after"]) == N_FILES
    assert {rank["load after"].get("value") for rank in ranks} == {1}
    require_goes_on(ranks)


@needs_strace
@on_each_python(UNKNOWN_FAULTS)
def test_save_says_when_its_outcome_is_unknown(said, python, name):
    ranks = said(python, name)

    require_hit(name, ranks)
    require_same_error(name, ranks)
    assert {rank["outcome"] for rank in ranks} == {"unknown"}
    assert "unknown" in ranks[0]["text"]
    # Nothing that a manifest on disk may refer to was removed.
    assert sum(name.startswith("rank") for name in ranks[0]["files after"]) == SIZE
    require_goes_on(ranks)


@needs_strace
@on_each_python(TOLERATED_FAULTS)
def test_save_gets_over(said, python, name):
    ranks = said(python, name)

    require_hit(name, ranks)
    assert {rank["class"] for rank in ranks} == {None}, ranks[0].get("text")
    assert {rank["load after"].get("value") for rank in ranks} == {2}
    require_goes_on(ranks)


@needs_strace
@on_each_python(LOAD_FAULTS)
def test_load_raises_the_same_error_on_all_ranks(said, python, name):
    ranks = said(python, name)

    require_hit(name, ranks)
    require_same_error(name, ranks)
    assert {rank["load after"].get("value") for rank in ranks} == {1}
    require_goes_on(ranks)


def test_save_gets_over_file_system_that_refuses_direct_writes(tmp_path, monkeypatch):
    pwrite, refused = os.pwrite, []

    def pwrite_unless_direct(descriptor, view, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            time.sleep(0.05)  # so that several threads of one shard meet the refusal
            raise OSError(errno.EINVAL, "direct I/O refused")
        return pwrite(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite_unless_direct)
    options = SaveOptions(block_nbytes=64 << 10, direct_io="on")

    save(tmp_path / "checkpoint", step=1, size=2, rows=40_000, options=options)

    if not refused:
        pytest.skip(f"no O_DIRECT on the file system of {tmp_path}")
    require_loads(tmp_path / "checkpoint", step=1, size=2, rows=40_000)


@pytest.mark.parametrize("python", pythons(), ids=lambda p: Path(p).parts[-3])
@pytest.mark.parametrize("moment", ["before it writes", "while it writes"])
def test_save_fails_alike_when_one_rank_has_no_space(small_disk, moment, python):
    program = start(
        [str(PROGRAMS / "save_without_space.py"), str(small_disk), moment],
        size=SIZE,
        python=python,
    )
    outcome = finish(program, 120)
    assert outcome.returncode == 0, outcome.output
    ranks = json.loads((small_disk / "said.json").read_text())

    assert {rank["class"] for rank in ranks} == {"StorageError"}, ranks
    assert {rank["errno"] for rank in ranks} == {errno.ENOSPC}
    assert len({rank["text"] for rank in ranks}) == 1
    assert ranks[0]["host"] == ranks[0]["host here"]
    assert ranks[0]["path"].startswith(str(small_disk / "step-2"))
    if moment == "while it writes":
        assert 2 in ranks[0]["failing"]
    assert ranks[0]["files after"] == []
    assert {rank["load previous"].get("value") for rank in ranks} == {1}
    # The same directory takes a smaller state afterwards, and nothing else is there.
    assert {rank["again"]["class"] for rank in ranks} == {None}
    step_2 = small_disk / "step-2"
    assert files_of(step_2) == files_named_by_manifest(step_2)
