"""What goes wrong behind the back of a training is raised on all ranks alike."""

import errno
import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from tests.mpi_launch import finish, start

PROGRAMS = Path(__file__).parent / "programs"
SIZE = 3
TIMEOUT_S = 120
MANIFEST_TMP = "{run}/step-0000000002/manifest.json.tmp"

FAULTS = {
    "ENOSPC at a write": ("pwrite64:error=ENOSPC:when=1", 2, None),
    "EIO at every write of rank 0": ("pwrite64:error=EIO", 0, None),
    "EIO at the sync of a shard": ("fsync:error=EIO:when=1", 1, None),
    "EDQUOT at the rename of a shard": ("rename:error=EDQUOT:when=1", 2, None),
    "ENOSPC at the write of the manifest": ("write:error=ENOSPC", 0, MANIFEST_TMP),
    "EIO at the rename of the manifest": ("rename:error=EIO", 0, MANIFEST_TMP),
}
CASES = [(name, progress) for name in FAULTS for progress in ("poll", "thread")]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed"
)


def case_of(name, progress, folder):
    inject, rank, path = FAULTS[name]
    own = f"{name}-{progress}".replace(" ", "-")
    return {
        "name": own,
        "progress": progress,
        "fault": {
            "rank": rank,
            "inject": inject,
            "path": path and path.format(run=folder / own),
        },
    }


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the ranks of one MPI program said of each fault, one after the other."""
    folder = tmp_path_factory.mktemp("faults")

    @cache
    def run_program():
        cases = [case_of(name, progress, folder) for name, progress in CASES]
        (folder / "cases.json").write_text(json.dumps(cases))
        arguments = [PROGRAMS / "async_under_faults.py", folder, folder / "cases.json"]
        program = start(["-m", "mpi4py", *map(str, arguments)], size=SIZE)
        return finish(program, TIMEOUT_S).output

    def said_of(name, progress):
        output = run_program()
        path = folder / f"{case_of(name, progress, folder)['name']}.json"
        assert path.exists(), f"the program ended before:\n{output[-5000:]}"
        return json.loads(path.read_text())

    return said_of


@needs_strace
@pytest.mark.parametrize(("name", "progress"), CASES)
def test_failure_in_the_background_is_raised_alike_and_harms_nothing(
    said, name, progress
):
    inject, culprit, _ = FAULTS[name]

    ranks = said(name, progress)

    assert ranks[culprit]["hits"], "strace failed no call"
    assert {rank["class"] for rank in ranks} == {"StorageError"}
    assert len({(rank["text"], rank["reached"]) for rank in ranks}) == 1
    assert {rank["rank"] for rank in ranks} == {culprit}
    assert ranks[0]["errno"] == getattr(errno, inject.split("=")[1].split(":")[0])
    assert ranks[0]["files after"] == []
    assert ranks[0]["published"] == [1, ranks[0]["reached"] + 1]


def said_on(disk, case):
    arguments = [str(PROGRAMS / "async_without_space.py"), str(disk), case]
    outcome = finish(start(["-m", "mpi4py", *arguments], size=SIZE), TIMEOUT_S)
    assert outcome.returncode == 0, outcome.output[-5000:]
    return json.loads((disk / "said.json").read_text())


@pytest.mark.parametrize("small_disk", ["6m"], indirect=True)
def test_disk_that_fills_behind_a_save_is_raised_on_all_ranks(small_disk):
    ranks = said_on(small_disk, "filled")

    assert {rank["class"] for rank in ranks} == {"StorageError"}
    assert {rank["errno"] for rank in ranks} == {errno.ENOSPC}
    assert len({(rank["text"], rank["reached"]) for rank in ranks}) == 1
    assert ranks[0]["steps"] == [1, 2]


@pytest.mark.parametrize("small_disk", ["6m"], indirect=True)
def test_oldest_go_first_and_never_the_last_one_where_few_fit(small_disk):
    ranks = said_on(small_disk, "small")

    seen = ranks[0]["seen"]
    assert ranks[0]["whole"]
    for step, steps in enumerate(seen, start=1):
        assert steps == list(range(steps[0], step + 1))
        assert len(steps) >= min(step, 2)
    assert seen[-1][0] > 1


LEAVE_EARLY = """
import sys
import numpy as np
from mpi4py import MPI
from mpickpt import Sharded, save_sharded_async

state = {"x": Sharded.block(np.zeros(int(sys.argv[3])))}
path, progress = sys.argv[1:3]
save_sharded_async(state, path, step=1, comm=MPI.COMM_WORLD, progress=progress)
"""


@pytest.mark.parametrize("progress", ["poll", "thread"])
@pytest.mark.parametrize("n_elements", [1_000, 5_000_000])
def test_program_that_never_asks_for_the_result_ends_well(
    tmp_path, progress, n_elements
):
    arguments = ["-c", LEAVE_EARLY, str(tmp_path / "c"), progress, str(n_elements)]

    outcome = finish(start(arguments, size=SIZE), 60)

    assert not outcome.timed_out
    assert outcome.returncode == 0, outcome.output
