"""Damages every part of a checkpoint: every rank refuses it alike, and soon."""

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
    StorageError,
    WorldSizeMismatchError,
    load_sharded,
    open_checkpoint,
    read_manifest,
    save_sharded,
)
from mpickpt.format.manifest import parse_manifest
from mpickpt.storage.verification import verify_checkpoint
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
REGIONS = [
    "metadata 0",
    "array model/half",
    "array own",
    "index",
    "padding 4",
    "array model/w",
    "metadata 6",
    "table",
]
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


def require_readers_refuse(checkpoint, path, expected):
    """Assert that the readers without MPI find the damage in one file, and no other."""
    for fast in (False, True):
        report = verify_checkpoint(checkpoint, fast=fast)
        [failure] = report.failures
        assert checkpoint / failure.path == path
        assert type(failure.error) is expected
    with open_checkpoint(checkpoint) as opened, pytest.raises(expected):
        opened.load()


def test_damaged_regions_tile_the_shard(run):
    regions = regions_of(run / "first", RANK)

    assert list(regions) == REGIONS
    stops = [0, *(stop for _, stop in regions.values())]
    assert [start for start, _ in regions.values()] == stops[:-1]
    assert stops[-1] == shard(run / "first", RANK).stat().st_size


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("place", ["first byte", "middle byte", "last byte"])
@pytest.mark.parametrize("region", REGIONS)
def test_load_refuses_flipped_bit(checkpoint, region, place, verify):
    low, high = regions_of(checkpoint, RANK)[region]
    offsets = {"first byte": low, "middle byte": (low + high) // 2}
    flip_bit(shard(checkpoint, RANK), offsets.get(place, high - 1))

    error = refusal(checkpoint, CorruptShardError, verify=verify)

    assert error.rank == RANK
    assert error.path == str(shard(checkpoint, RANK))
    assert error.path in str(error)
    assert error.expected != error.actual


@pytest.mark.parametrize("region", REGIONS)
def test_readers_without_mpi_refuse_flipped_bit(checkpoint, region):
    flip_bit(shard(checkpoint, RANK), regions_of(checkpoint, RANK)[region][0])

    require_readers_refuse(checkpoint, shard(checkpoint, RANK), CorruptShardError)


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


@pytest.mark.parametrize("verify", VERIFY)
def test_resharding_refuses_flipped_bit(checkpoint, verify):
    flip_bit(shard(checkpoint, RANK), regions_of(checkpoint, RANK)["array model/w"][0])

    error = refusal(
        checkpoint,
        CorruptShardError,
        size=3,
        reshard=True,
        verify=verify,
        only=["model/*", "scale"],
    )

    # The shard is named, whichever of the three ranks reads it.
    assert error.path == str(shard(checkpoint, RANK))


@pytest.mark.parametrize("verify", [*VERIFY, "none"])
@pytest.mark.parametrize("region", ["start", *REGIONS])
def test_load_refuses_shard_cut_short(checkpoint, region, verify):
    low, high = regions_of(checkpoint, RANK).get(region, (0, 1))
    os.truncate(shard(checkpoint, RANK), low if region == "start" else high - 1)

    error = refusal(checkpoint, IncompleteCheckpointError, verify=verify)

    assert error.rank == RANK
    assert error.path == str(shard(checkpoint, RANK))
    require_readers_refuse(checkpoint, shard(checkpoint, RANK), type(error))


@pytest.mark.parametrize("region", REGIONS)
def test_load_refuses_shard_cut_at_the_start_of(checkpoint, region):
    os.truncate(shard(checkpoint, RANK), regions_of(checkpoint, RANK)[region][0])

    refusal(checkpoint, IncompleteCheckpointError)


@pytest.mark.parametrize("verify", [*VERIFY, "none"])
def test_load_refuses_shard_that_grew(checkpoint, verify):
    with shard(checkpoint, RANK).open("ab") as file:
        file.write(b"\0")

    refusal(checkpoint, IncompleteCheckpointError, verify=verify)


@pytest.mark.parametrize("verify", [*VERIFY, "none"])
@pytest.mark.parametrize("rank", range(SIZE))
def test_load_refuses_missing_shard(checkpoint, rank, verify):
    path = shard(checkpoint, rank)
    path.unlink()

    error = refusal(checkpoint, IncompleteCheckpointError, verify=verify)

    assert (error.rank, error.path) == (rank, str(path))
    require_readers_refuse(checkpoint, path, IncompleteCheckpointError)


def test_load_refuses_manifest_without_any_shard(checkpoint):
    for rank in range(SIZE):
        shard(checkpoint, rank).unlink()

    error = refusal(checkpoint, IncompleteCheckpointError)

    assert sorted(error.failures) == list(range(SIZE))


@pytest.mark.parametrize("verify", VERIFY)
def test_load_refuses_shard_of_another_save(run, checkpoint, verify):
    path = shard(checkpoint, RANK)
    shutil.copy(shard(run / "other step", RANK), path)

    refusal(checkpoint, CorruptShardError, verify=verify)
    require_readers_refuse(checkpoint, path, CorruptShardError)


def test_load_accepts_shard_of_an_equal_save(run, checkpoint):
    shutil.copy(shard(run / "second", RANK), shard(checkpoint, RANK))

    require_loads(checkpoint, step=1, rows=ROWS)


@pytest.mark.parametrize("verify", VERIFY)
def test_load_refuses_two_shards_that_were_swapped(checkpoint, verify):
    first, second = shard(checkpoint, 1), shard(checkpoint, 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)

    begin = time.monotonic()
    outcomes = try_load(checkpoint, verify=verify)

    # Of another length, or of another content.
    assert type(outcomes[0]) in (CorruptShardError, IncompleteCheckpointError)
    assert {(type(o), str(o)) for o in outcomes} == {
        (type(outcomes[0]), str(outcomes[0]))
    }
    assert time.monotonic() - begin < SECONDS
    report = verify_checkpoint(checkpoint)
    assert [checkpoint / failure.path for failure in report.failures] == [first, second]


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


def test_load_refuses_manifest_of_another_save(run, checkpoint):
    shutil.copy(run / "second" / "manifest.json", checkpoint / "manifest.json")

    refusal(checkpoint, IncompleteCheckpointError)


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


def test_load_refuses_shards_of_another_world_size(run, checkpoint):
    shutil.copy(shard(run / "three ranks", 1), shard(checkpoint, 1))

    outcomes = try_load(checkpoint)

    assert type(outcomes[0]) in (CorruptShardError, IncompleteCheckpointError)
    assert {str(outcome) for outcome in outcomes} == {str(outcomes[0])}


def test_parse_refuses_every_flipped_bit_of_the_manifest(run):
    text = (run / "first" / "manifest.json").read_bytes()
    parse_manifest(text, where="here")

    accepted = []
    for offset in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[offset] ^= 1 << bit
            try:
                parse_manifest(bytes(damaged), where="here")
            except ManifestError:
                continue
            accepted.append((offset, bit))

    assert accepted == []


def test_parse_refuses_every_shorter_and_longer_manifest(run):
    text = (run / "first" / "manifest.json").read_bytes()

    for length in range(len(text)):
        with pytest.raises(ManifestError):
            parse_manifest(text[:length], where="here")
    for more in (b"\n", b" ", b"{}", b"\0", text):
        with pytest.raises(ManifestError):
            parse_manifest(text + more, where="here")


@pytest.mark.parametrize("place", ["first", "middle", "digest", "last"])
def test_every_reader_refuses_flipped_bit_of_the_manifest(checkpoint, place):
    path = checkpoint / "manifest.json"
    text = path.read_bytes()
    offsets = {"first": 0, "middle": len(text) // 2, "last": len(text) - 1}
    digest = text.index(b'"manifest_sha256": "') + 30
    flip_bit(path, offsets.get(place, digest))

    error = refusal(checkpoint, ManifestError)

    assert error.rank == 0
    assert str(path) in str(error)
    for read in (read_manifest, open_checkpoint, verify_checkpoint):
        with pytest.raises(ManifestError):
            read(checkpoint)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096], ids=["empty", "zeros"])
def test_load_refuses_manifest_that_was_torn(checkpoint, content):
    (checkpoint / "manifest.json").write_bytes(content)

    refusal(checkpoint, ManifestError)


@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "missing"])
@pytest.mark.parametrize("verify", VERIFY)
def test_load_refuses_damaged_layout_file(checkpoint, damage, verify):
    path = checkpoint / read_manifest(checkpoint).layout.path
    nbytes = path.stat().st_size
    offsets = range(0, nbytes, nbytes // 8) if damage == "flipped bit" else [0]
    expected = (
        CorruptShardError if damage == "flipped bit" else IncompleteCheckpointError
    )

    for offset in offsets:
        if damage == "flipped bit":
            flip_bit(path, offset)
        elif damage == "cut short":
            os.truncate(path, nbytes - 1)
        else:
            path.unlink()
        error = refusal(checkpoint, expected, verify=verify)
        [failure] = verify_checkpoint(checkpoint).failures
        assert checkpoint / failure.path == path
        assert error.path == str(path)
        if damage == "flipped bit":
            flip_bit(path, offset)


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


def test_load_refuses_a_directory_in_place_of_a_shard(checkpoint):
    path = shard(checkpoint, RANK)
    path.unlink()
    path.mkdir()

    error = refusal(checkpoint, StorageError)

    assert error.path == str(path)


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
