"""Runs 64 ranks on whatever cores there are, and reshards to three quarters."""

import json
from pathlib import Path

import pytest

from mpickpt.storage.verification import verify_checkpoint
from tests.crash.small_state import files_named_by_manifest, files_of, flat, try_load
from tests.mpi_launch import finish, pythons, start

SIZE = 64
# Another MPI takes the longer for it, the more ranks share a core.
OTHER_SIZE = 32
PROGRAM = str(Path(__file__).parent / "programs" / "many_ranks.py")
TIMEOUT_S = 300


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("python", pythons(), ids=lambda p: Path(p).parts[-3])
def test_many_ranks_save_load_and_reshard(tmp_path, python):
    size = SIZE if python == pythons()[0] else OTHER_SIZE
    path, results = tmp_path / "checkpoint", tmp_path / "found.json"

    program = start([PROGRAM, str(path), str(results)], size=size, python=python)
    outcome = finish(program, TIMEOUT_S)

    assert not outcome.timed_out and outcome.returncode == 0, outcome.output[-5000:]
    found = json.loads(results.read_text())
    assert [rank["rank"] for rank in found] == list(range(size))
    assert all(rank["equal"] for rank in found)
    assert files_of(path) == files_named_by_manifest(path)
    assert verify_checkpoint(path).is_whole
    # Ranks as threads see the same files, whichever MPI wrote them.
    arrays = ["field", "flat", "same"]
    halves = try_load(path, size=2, reshard=True, only=arrays)
    assert [half["field"].data[0, 0] for half in halves] == [0, 64 * 48 * 3 * 16 // 2]
    assert flat(halves[0]["same"]) == flat(halves[1]["same"])
