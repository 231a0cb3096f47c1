"""A rank is killed while shards go from node to node: nothing saved is lost."""

from pathlib import Path

import pytest

from mpickpt import step_path
from tests.local_tier import Disks, saved
from tests.mpi_launch import finish, start

SIZE, STEP = 3, 7
PROGRAM = str(Path(__file__).parent / "programs" / "bring_and_die.py")
PLACES = (
    "while a shard arrives",
    "before a shard has its name",
    "before the manifest",
)


@pytest.mark.parametrize("where", PLACES)
def test_killed_restore_is_done_again(tmp_path, where):
    disks = Disks(tmp_path, SIZE)
    run = tmp_path / "shared"
    saved(run, SIZE, STEP)
    # Two nodes alone have the manifest, so that there is one to be published.
    disks.spread(step_path(run, STEP), homes=range(SIZE), manifests=[0, 1])
    before = disks.files()

    killed = finish(start([PROGRAM, str(tmp_path), str(STEP), where], size=SIZE), 60)

    assert killed.returncode != 0, killed.output
    assert "restored" not in killed.output
    after = disks.files()
    assert {name for name, content in before.items() if after.get(name) != content} <= {
        name for name in before if name.endswith("manifest.json")
    }

    again = finish(start([PROGRAM, str(tmp_path), str(STEP), ""], size=SIZE), 60)

    assert again.returncode == 0, again.output
    assert "restored: " in again.output
    assert not list(tmp_path.rglob("rank*.tmp"))
