"""Restores on nodes whose disks no other node sees, all under one path."""

import shutil

import pytest

import mpickpt
from mpickpt.storage import filesystem
from tests.forged_nodes import two_nodes, why_not
from tests.local_tier import restorer_of, saved
from tests.states import on_ranks
from tests.training import Training

SIZE, STEP = 4, 7


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    missing = why_not()
    if missing:
        pytest.skip(missing)
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def mounts_of_thread(monkeypatch):
    # Ranks are threads here, each with mounts of its own.
    mounts = filesystem.MOUNTINFO.parent.parent / "thread-self/mountinfo"
    monkeypatch.setattr(filesystem, "MOUNTINFO", mounts)


def test_ranks_that_changed_nodes_find_their_shards(nodes, tmp_path):
    source = saved(tmp_path / "shared", SIZE, STEP)
    manifest = mpickpt.read_manifest(source)
    run = nodes.own / "run"

    def place(comm):
        directory = mpickpt.step_path(run, STEP)
        directory.mkdir(parents=True, exist_ok=True)
        names = [manifest.shards[comm.rank].path]
        names += ["manifest.json", manifest.layout.path] if comm.rank == 0 else []
        for name in names:
            shutil.copyfile(source / name, directory / name)

    on_ranks(SIZE, nodes.in_turn(place))

    def restore_elsewhere(comm):
        nodes.enter((comm.rank + 1) % 2)
        training = Training(comm)
        restored = restorer_of(comm, run, training).newest(None)
        training.adopt(restored)
        training.require_step(STEP)
        return restored.source

    found = on_ranks(SIZE, restore_elsewhere)

    assert set(found) == {"2 shards from node node0, 2 from node node1"}
    for number in (0, 1):
        listed = nodes.run(number, "ls", str(mpickpt.step_path(run, STEP)))
        assert listed.count("rank") == SIZE
        assert "manifest.json" in listed
