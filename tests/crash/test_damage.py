"""Damages a checkpoint in ways that tests/faults/damage.py does not, or under MPI.

Every rank must refuse it alike, and soon.
"""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from mpickpt import (
    CheckpointNotFoundError,
    CorruptShardError,
    IncompleteCheckpointError,
    ManifestError,
    PerRank,
    Sharded,
    WorldSizeMismatchError,
    load_sharded,
    open_checkpoint,
    read_manifest,
    save_sharded,
)
from tests.crash.small_state import (
    files_of,
    flip_bit,
    regions_of,
    require_loads,
    save,
    state_of,
    try_load,
)
from tests.mpi_launch import finish, pythons, start
from tests.ranks_as_threads import run_ranks

SIZE = 4
RANK = 2
ROWS = 30_000  # 480 kB: HDF5 aligns such an array, so that the shard has padding
VERIFY = ["sha256", "crc32"]
SECONDS = 10.0
PROGRAM = str(Path(__file__).parent / "programs" / "load_each.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two saves of one state and one of another number of ranks."""
    run = tmp_path_factory.mktemp("run")
    for name in ("first", "second"):
        save(run / name, step=1, size=SIZE, rows=ROWS)
    save(run / "other step", step=2, size=SIZE, rows=ROWS)
    save(run / "three ranks", step=1, size=3, rows=ROWS)
    return run


@pytest.fixture
def checkpoint(run, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(run / "first", tmp_path / "checkpoint"))


def shard(checkpoint, rank):
    return checkpoint / read_manifest(checkpoint).shards[rank].path


def refusal(path, expected, *, size=SIZE, **options):
    """Assert that every rank raises the same error of a class; return it."""
    begin = time.monotonic()
    outcomes = try_load(path, size=size, **options)
    seconds = time.monotonic() - begin
    kinds = {(type(outcome), str(outcome)) for outcome in outcomes}
    assert len(kinds) == 1, outcomes
    assert type(outcomes[0]) is expected, outcomes[0]
    assert seconds < SECONDS
    return outcomes[0]


@pytest.mark.parametrize("verify", VERIFY)
def test_load_refuses_flipped_bit_anywhere_in_shard(tmp_path, verify):
    checkpoint = tmp_path / "one rank"
    save(checkpoint, step=1, size=1, rows=20)
    path = shard(checkpoint, 0)

    for offset in range(0, path.stat().st_size, 13):
        flip_bit(path, offset, bit=offset % 8)
        [outcome] = try_load(checkpoint, size=1, verify=verify)
        flip_bit(path, offset, bit=offset % 8)
        assert type(outcome) is CorruptShardError, f"byte {offset}: {outcome!r}"

    require_loads(checkpoint, step=1, size=1, rows=20)


@pytest.mark.parametrize("verify", VERIFY)
def test_load_refuses_flipped_bit_where_no_array_lies(tmp_path, verify):
    checkpoint = tmp_path / "checkpoint"
    save(checkpoint, step=1, size=1, rows=1_200_000)  # more than one block of CRC-32
    regions = regions_of(checkpoint, 0)
    outside = [span for name, span in regions.items() if "metadata" in name]

    for low, high in outside:
        for offset in (low, high - 1):
            flip_bit(shard(checkpoint, 0), offset)
            [outcome] = try_load(checkpoint, size=1, verify=verify)
            flip_bit(shard(checkpoint, 0), offset)
            assert type(outcome) is CorruptShardError, f"byte {offset}"


@pytest.mark.parametrize("verify", VERIFY)
def test_load_refuses_flipped_bit_in_shard_without_arrays(tmp_path, verify):
    def save_rank(comm):
        pieces = [(0, state_of(0, 1)["own"].data)] if comm.rank == 0 else []
        whole = (3,)
        tree = {"x": Sharded.pieces(pieces, global_shape=whole), "rank": comm.rank}
        return save_sharded(tree, tmp_path / "c", step=1, comm=comm)

    run_ranks(2, save_rank)
    flip_bit(shard(tmp_path / "c", 1), 0)

    outcomes = run_ranks(
        2, lambda comm: load_sharded(tmp_path / "c", comm=comm, verify=verify)
    )

    assert [type(outcome) for outcome in outcomes] == [CorruptShardError] * 2


def test_load_that_verifies_nothing_refuses_shard_cut_short(checkpoint):
    path = shard(checkpoint, RANK)
    os.truncate(path, path.stat().st_size - 1)

    error = refusal(checkpoint, IncompleteCheckpointError, verify="none")

    assert (error.rank, error.path) == (RANK, str(path))


def test_load_that_verifies_nothing_refuses_shard_that_grew(checkpoint):
    with shard(checkpoint, RANK).open("ab") as file:
        file.write(b"\0")

    refusal(checkpoint, IncompleteCheckpointError, verify="none")


def test_load_that_verifies_nothing_refuses_missing_shard(checkpoint):
    path = shard(checkpoint, RANK)
    path.unlink()

    error = refusal(checkpoint, IncompleteCheckpointError, verify="none")

    assert (error.rank, error.path) == (RANK, str(path))


def test_load_refuses_manifest_without_any_shard(checkpoint):
    for rank in range(SIZE):
        shard(checkpoint, rank).unlink()

    error = refusal(checkpoint, IncompleteCheckpointError)

    assert sorted(error.failures) == list(range(SIZE))


@pytest.mark.parametrize("verify", [*VERIFY, "none"])
def test_load_refuses_equal_shards_that_were_swapped(tmp_path, verify):
    def save_rank(comm):
        tree = {"x": PerRank(np.ones(5))}
        return save_sharded(tree, tmp_path / "c", step=1, comm=comm)

    run_ranks(2, save_rank)
    first, second = shard(tmp_path / "c", 0), shard(tmp_path / "c", 1)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)

    outcomes = run_ranks(
        2, lambda comm: load_sharded(tmp_path / "c", comm=comm, verify=verify)
    )

    # Only the rank in their indexes differs.
    assert [type(outcome) for outcome in outcomes] == [CorruptShardError] * 2


def test_load_refuses_directory_without_manifest(checkpoint):
    (checkpoint / "manifest.json").unlink()

    error = refusal(checkpoint, CheckpointNotFoundError)

    assert "4 shards but no manifest.json" in str(error)


@pytest.mark.parametrize("version", [0, 2, 999, "1", True, None, 1.0])
def test_load_refuses_unknown_schema_version(checkpoint, version):
    path = checkpoint / "manifest.json"
    document = json.loads(path.read_text())
    document["schema_version"] = version
    path.write_text(json.dumps(document))

    error = refusal(checkpoint, ManifestError)

    assert "schema" in str(error)


def test_refusal_of_newer_schema_says_what_to_do(checkpoint):
    path = checkpoint / "manifest.json"
    path.write_bytes(b'{"schema_version": 2, "of": "the future"}')

    error = refusal(checkpoint, ManifestError)

    assert "newer" in str(error) and "upgrade" in str(error)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_load_refuses_another_world_size(checkpoint, size):
    for rank in range(SIZE):
        shard(checkpoint, rank).unlink()  # it is refused before a shard is opened

    error = refusal(checkpoint, WorldSizeMismatchError, size=size)

    assert (error.saved, error.current) == (SIZE, size)
    assert "reshard=True" in str(error)


@pytest.mark.parametrize("damage", ["flipped bit", "missing"])
def test_slices_are_right_when_layout_file_is_damaged(checkpoint, damage, caplog):
    path = checkpoint / read_manifest(checkpoint).layout.path
    if damage == "missing":
        path.unlink()
    else:
        low, nbytes, _ = read_manifest(checkpoint).layout.payload
        flip_bit(path, low + nbytes // 2)

    with open_checkpoint(checkpoint) as opened:
        rows = opened["model", "w"][ROWS : ROWS + 5]

    assert (rows == state_of(1, 1, ROWS)["model"]["w"].data[:5]).all()
    assert "layout file" in caplog.text


def test_damage_is_left_as_it_was_found(checkpoint):
    flip_bit(shard(checkpoint, RANK), 0)
    before = files_of(checkpoint)

    refusal(checkpoint, CorruptShardError)

    assert files_of(checkpoint) == before


DAMAGES = {
    "whole": lambda c: None,
    "metadata": lambda c: flip_bit(shard(c, RANK), 0),
    "array": lambda c: flip_bit(
        shard(c, RANK), regions_of(c, RANK)["array model/w"][0]
    ),
    "index": lambda c: flip_bit(shard(c, RANK), regions_of(c, RANK)["index"][0]),
    "table": lambda c: flip_bit(shard(c, RANK), regions_of(c, RANK)["table"][0]),
    "cut": lambda c: os.truncate(shard(c, RANK), 100),
    "missing": lambda c: shard(c, RANK).unlink(),
    "manifest": lambda c: flip_bit(c / "manifest.json", 100),
    "layout": lambda c: flip_bit(c / read_manifest(c).layout.path, 0),
    "unpublished": lambda c: (c / "manifest.json").unlink(),
    "three ranks": lambda c: None,
}
UNDER_MPI = {
    "metadata": CorruptShardError,
    "array": CorruptShardError,
    "index": CorruptShardError,
    "table": CorruptShardError,
    "cut": IncompleteCheckpointError,
    "missing": IncompleteCheckpointError,
    "manifest": ManifestError,
    "layout": CorruptShardError,
    "unpublished": CheckpointNotFoundError,
    "three ranks": WorldSizeMismatchError,
}


@pytest.fixture(scope="module", params=pythons(), ids=lambda p: Path(p).parts[-3])
def under_mpi(request, run, tmp_path_factory):
    """What four MPI processes said of each damaged checkpoint, one after the other."""
    folder = tmp_path_factory.mktemp("damaged")
    for name, damage in DAMAGES.items():
        source = run / (name if name == "three ranks" else "first")
        damage(Path(shutil.copytree(source, folder / name)))
    results = folder / "results.json"
    program = start([PROGRAM, folder, results], size=SIZE, python=request.param)
    outcome = finish(program, 120)
    assert outcome.returncode == 0, outcome.output
    return json.loads(results.read_text())


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("damage", UNDER_MPI)
def test_mpi_ranks_raise_the_same_error(under_mpi, damage, verify):
    said = under_mpi[f"{damage} {verify}"]

    assert {rank["class"] for rank in said} == {UNDER_MPI[damage].__name__}
    assert len({rank["text"] for rank in said}) == 1
    assert max(rank["seconds"] for rank in said) < SECONDS
    # The communicator stays good: what is whole loads after all that.
    assert {rank["class"] for rank in under_mpi[f"whole {verify}"]} == {"dict"}
