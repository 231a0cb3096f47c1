"""The directory that a node has for itself, and what a manifest says lies there."""

from pathlib import Path

import pytest

import mpickpt
from mpickpt.errors import StorageError
from mpickpt.format.local_tier import (
    for_node,
    has_layout_here,
    shards_here,
    with_local_tier,
)
from mpickpt.format.manifest import dump_manifest, parse_manifest
from mpickpt.storage.contents import wrong_files
from mpickpt.storage.node_disk import OwnDisk, node_name, own_directory

TOKENS = ("0" * 32, "1" * 32)


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DISK", "/nvme")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("/nvme/run", "/nvme/run"),
        ("$DISK/run", "/nvme/run"),
        ("${DISK}0/run", "/nvme0/run"),
        ("~/run", "/home/me/run"),
        ("/disks/{node}/run", "/disks/n7/run"),
        ("$DISK/{node}/run-{node}", "/nvme/n7/run-n7"),
        (Path("$DISK") / "{node}" / ".." / "x", "/nvme/x"),
    ],
)
def test_template_is_filled_in(template, expected):
    assert own_directory(template) == Path(expected)


def test_relative_template_lies_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert own_directory("run") == tmp_path / "run"


def test_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("DISK")

    with pytest.raises(ValueError, match="the variable DISK is not set"):
        own_directory("$DISK/run")


def test_node_has_the_name_of_its_host_without_slurm(monkeypatch):
    monkeypatch.delenv("SLURMD_NODENAME")
    monkeypatch.setattr("socket.gethostname", lambda: "host3")

    assert node_name() == "host3"


def test_disk_is_a_node_s_own_where_nobody_else_makes_a_mark(tmp_path):
    disk = OwnDisk(tmp_path, TOKENS[0])

    disk.mark()
    disk.require_alone()
    disk.unmark()

    assert not list(tmp_path.iterdir())


def test_directory_of_two_nodes_is_refused(tmp_path):
    disks = [OwnDisk(tmp_path, token) for token in TOKENS]
    for disk in disks:
        disk.mark()

    with pytest.raises(StorageError, match="one directory for several nodes"):
        disks[1].require_alone()


def placed(saved, nodes, copies):
    manifest = mpickpt.read_manifest(saved)
    return with_local_tier(manifest, nodes=nodes, copies=copies)


def ranks(shards):
    return [shard.rank for shard in shards]


def test_manifest_says_which_shards_lie_on_each_node(saved):
    manifest = placed(saved, {"a": [0], "b": [1, 2]}, {"a": [2], "b": [0]})
    own = {name: for_node(manifest, name) for name in ("a", "b", "c")}

    read = {
        name: parse_manifest(dump_manifest(one), where=name)
        for name, one in own.items()
    }

    assert ranks(shards_here(read["a"])) == [0, 2]
    assert ranks(shards_here(read["b"])) == [0, 1, 2]
    assert ranks(shards_here(read["c"])) == []
    assert [has_layout_here(read[name]) for name in "abc"] == [True, True, False]


def test_all_shards_are_here_where_a_manifest_says_nothing_of_nodes(saved):
    manifest = mpickpt.read_manifest(saved)
    elsewhere = placed(saved, {"a": [0], "b": [1, 2]}, {})

    assert shards_here(manifest) == manifest.shards
    assert shards_here(elsewhere) == manifest.shards
    assert has_layout_here(manifest)


@pytest.mark.parametrize(
    "tier",
    [
        {"kind": "local", "node": "a"},
        {"kind": "local", "node": "a", "nodes": 7, "copies": None},
        {"kind": "local", "node": 1.5, "nodes": {"a": [0]}},
        {"kind": "local", "node": "a", "nodes": {"a": "0"}},
    ],
)
def test_tier_of_another_writer_does_no_harm(saved, tier):
    manifest = placed(saved, {}, {})
    manifest.extra["tier"] = tier

    assert shards_here(manifest) == ()


def test_only_what_a_node_should_have_is_missed(copied):
    manifest = for_node(placed(copied, {"a": [0], "b": [1]}, {}), "b")
    shards = manifest.shards
    (copied / shards[0].path).unlink()
    (copied / manifest.layout.path).unlink()

    assert wrong_files(copied, manifest) == []

    (copied / shards[1].path).write_bytes(b"cut")
    assert wrong_files(copied, manifest) == [shards[1].path]
