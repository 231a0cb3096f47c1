"""`mpickpt doctor` under mpiexec on two nodes: what they see of each other."""

import contextlib
import json

import pytest

from tests import forged_nodes
from tests.faults import network_servers
from tests.faults.network import FILE_SYSTEMS
from tests.mpi_launch import finish, start

TIMEOUT_S = 90
SIZE = 4


def doctor(nodes, directory, *arguments, size=SIZE):
    """Return the exit status and the JSON."""
    words = [json.dumps(nodes), "doctor", str(directory), "--quick", "--json"]
    program = start(["tests/on_node.py", *words, *arguments], size=size)
    outcome = finish(program, TIMEOUT_S)
    assert not outcome.timed_out, outcome.output
    begin = outcome.output.find("{\n")
    assert begin >= 0, outcome.output
    found, _ = json.JSONDecoder().raw_decode(outcome.output[begin:])
    return outcome.returncode, found


@contextlib.contextmanager
def running(name, folder):
    (system,) = (each for each in FILE_SYSTEMS if each.name == name)
    if reason := network_servers.why_not(system.needs):
        pytest.skip(reason)
    with system.run(folder) as network:
        yield network


def test_a_disk_of_each_node_s_own_is_status_1(tmp_path):
    if reason := forged_nodes.why_not():
        pytest.skip(reason)
    with forged_nodes.two_nodes(tmp_path) as nodes:
        status, found = doctor(nodes.pids, nodes.own)

        assert status == 1
        assert found["ranks"]["ranks_per_host"] == [["node0", 2], ["node1", 2]]
        assert found["ranks"]["hosts_without"] == ["node1"]
        assert "not shared" in {each["about"] for each in found["advice"]}
        for number in range(forged_nodes.N_NODES):
            assert nodes.run(number, "ls", "-A", str(nodes.own)) == ""


def test_a_disk_that_both_nodes_see_is_shared(tmp_path):
    if reason := forged_nodes.why_not():
        pytest.skip(reason)
    (tmp_path / "seen by both").mkdir()
    with forged_nodes.two_nodes(tmp_path) as nodes:
        _, found = doctor(nodes.pids, tmp_path / "seen by both")

    ranks = found["ranks"]
    assert ranks["hosts_without"] == []
    assert ranks["locks_between_hosts"] is True
    assert {each["change"] for each in ranks["delays"]} == {
        *("new name", "name looked up before", "replaced file", "grown file")
    }
    assert all(each["n_missing"] == 0 for each in ranks["delays"])
    assert not [*(tmp_path / "seen by both").iterdir()]


def test_two_nodes_of_glusterfs(tmp_path):
    with running("gluster", tmp_path / "gluster") as network:
        status, found = doctor(network.nodes, network.shared)

    assert status == 0, found["advice"]
    assert found["place"]["file_system"]["kind"] == "glusterfs"
    assert found["tried"]["locks"] == {"flock": "granted", "fcntl": "granted"}
    ranks = found["ranks"]
    assert ranks["hosts_without"] == []
    assert {each["change"]: each["n_missing"] for each in ranks["delays"]} == {
        "new name": 0,
        "name looked up before": 0,
        "replaced file": 0,
        "grown file": 0,
    }


def test_names_that_come_late_are_told(tmp_path):
    pytest.importorskip("mfusepy")
    with running("nfs_like", tmp_path / "nfs") as network:
        status, found = doctor(network.nodes, network.shared, size=2)

    delays = {each["change"]: each for each in found["ranks"]["delays"]}
    # Its clients remember for 30 s that a name was absent, but not beyond a listing.
    assert delays["name looked up before"]["n_listed"] >= 1
    assert delays["new name"]["worst_s"] < 1
    assert "late changes" in {each["about"] for each in found["advice"]}
    assert status == 0, found["advice"]
