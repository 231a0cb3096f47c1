"""A rank dies while shards are copied between nodes, or while these publish."""

import hashlib
import json
import time
from pathlib import Path

import pytest

import mpickpt
from mpickpt.storage.catalog import step_path
from tests.mpi_launch import kill, start

PROGRAM = Path(__file__).parent / "programs" / "partner_dies.py"
SIZE = 4
TIMEOUT_S = 3
PATIENCE_S = 60

pytestmark = pytest.mark.timeout(120)


def said_by_survivors(folder, victim, moment, how):
    arguments = ["-m", "mpi4py", str(PROGRAM), str(folder), str(victim), moment, how]
    environ = {"MPICKPT_TIMEOUT_S": str(TIMEOUT_S)}
    with (folder / "output").open("w") as output:
        job = start(arguments, size=SIZE, environ=environ, output=output)
        try:
            paths = [folder / f"rank{rank}.json" for rank in range(SIZE)]
            del paths[victim]
            end = time.monotonic() + PATIENCE_S
            while not all(path.exists() for path in paths):
                text = (folder / "output").read_text()[-3000:]
                assert time.monotonic() < end, f"survivors hang: {text}"
                assert job.poll() is None, f"the job ended: {text}"
                time.sleep(0.05)
        finally:
            kill(job)
            job.wait()
    return [json.loads(path.read_text()) for path in paths]


def require_first_step_whole(folder):
    for node in ("n0", "n1"):
        directory = step_path(folder / node, 1)
        for record in mpickpt.read_manifest(directory).shards:
            content = (directory / record.path).read_bytes()
            assert hashlib.sha256(content).hexdigest() == record.sha256


@pytest.mark.parametrize(("victim", "how"), [(0, "poll"), (3, "at once")])
def test_nothing_is_published_when_a_rank_dies_amid_the_copies(tmp_path, victim, how):
    said = said_by_survivors(tmp_path, victim, "copy", how)

    for one in said:
        assert one["class"] == "CollectiveTimeoutError", one
        assert one["outcome"] == "unpublished"
        assert one["missing_ranks"] == [victim]
    assert not list(tmp_path.glob("*/step-0000000002/manifest.json*"))
    require_first_step_whole(tmp_path)


def test_outcome_is_unknown_when_a_rank_dies_while_nodes_publish(tmp_path):
    said = said_by_survivors(tmp_path, 2, "publish", "at once")

    for one in said:
        assert one["class"] == "CollectiveTimeoutError", one
        assert one["outcome"] == "unknown"
    # The other node has it: with the copies that lie there all of it is left.
    directory = step_path(tmp_path / "n0", 2)
    for record in mpickpt.read_manifest(directory).shards:
        content = (directory / record.path).read_bytes()
        assert hashlib.sha256(content).hexdigest() == record.sha256
    require_first_step_whole(tmp_path)
