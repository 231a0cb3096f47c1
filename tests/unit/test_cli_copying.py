"""The commands cp and flush."""

import json
import shutil
import threading

import msgspec
import pytest

import mpickpt
from mpickpt.cli import copy_options
from mpickpt.format.manifest import dump_manifest
from mpickpt.storage import catalog
from mpickpt.storage.copying import copy_shards
from tests.unit.cli_runs import flip_byte_of_shard, run, save
from tests.unit.copies import require_copy_of, require_unpublished


@pytest.fixture
def run_dir(tmp_path):
    for step in (3, 12):
        save(tmp_path / "run" / f"step-{step:010d}", step=step)
    return tmp_path / "run"


def step_of(run_dir, step):
    return mpickpt.step_path(run_dir, step)


def test_cp_copies_to_a_path(run_dir, tmp_path, capsys):
    source, target = step_of(run_dir, 3), tmp_path / "elsewhere" / "mine"

    status, out, _ = run(capsys, "cp", source, target)

    assert status == 0
    assert out.startswith(f"{target}: copied ")
    require_copy_of(source, target)


@pytest.mark.parametrize("kind", ["slash", "run", "controlled", "url"])
def test_cp_copies_into_a_run(run_dir, tmp_path, capsys, kind):
    source, other = step_of(run_dir, 3), tmp_path / "other"
    if kind == "run":
        save(step_of(other, 5), step=5)
    elif kind == "controlled":
        (other / ".mpickpt").mkdir(parents=True)
    text = {"slash": f"{other}/", "url": f"file://{other}/"}.get(kind, other)

    status, _, _ = run(capsys, "cp", source, text)

    assert status == 0
    require_copy_of(source, step_of(other, 3))


def test_cp_goes_on_in_a_directory_that_has_no_manifest_yet(run_dir, tmp_path, capsys):
    source, target = step_of(run_dir, 3), tmp_path / "mine"
    manifest = mpickpt.read_manifest(source)
    copy_shards(manifest, source, target, [0])

    status, out, _ = run(capsys, "cp", source, target)

    assert status == 0
    assert "were there" in out
    require_copy_of(source, target)


def test_cp_says_what_is_there_already(run_dir, tmp_path, capsys):
    source, target = step_of(run_dir, 3), tmp_path / "mine"
    run(capsys, "cp", source, target)

    status, out, _ = run(capsys, "cp", source, target)

    assert (status, out) == (0, f"{target}: this checkpoint is there already\n")


def test_cp_refuses_to_replace_another_checkpoint(run_dir, capsys):
    status, _, err = run(capsys, "cp", step_of(run_dir, 3), step_of(run_dir, 12))

    assert status == 1
    assert "another checkpoint" in err


def test_cp_of_a_damaged_checkpoint_names_the_shard(run_dir, tmp_path, capsys):
    shard = flip_byte_of_shard(step_of(run_dir, 3))

    status, _, err = run(capsys, "cp", step_of(run_dir, 3), tmp_path / "mine")

    assert status == 3
    assert str(shard) in err
    require_unpublished(tmp_path / "mine")


def test_cp_of_a_run_tells_which_checkpoint_is_its_latest(run_dir, tmp_path, capsys):
    status, _, err = run(capsys, "cp", run_dir, tmp_path / "mine")

    assert status == 4
    assert "step-0000000012" in err


@pytest.mark.parametrize(
    "words",
    [("--bandwidth", "fast"), ("--bandwidth", "0"), ("--jobs", "0"), ("--to", "x")],
)
def test_cp_refuses_wrong_usage(run_dir, tmp_path, capsys, words):
    with pytest.raises(SystemExit) as caught:
        run(capsys, "cp", step_of(run_dir, 3), tmp_path / "mine", *words)

    assert caught.value.code == 2


def test_cp_tells_a_log_how_it_goes_on(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(copy_options, "_LINE_EVERY_S", 0.0)

    _, out, err = run(capsys, "cp", step_of(run_dir, 3), tmp_path / "mine")

    lines = err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("mine: ") and line.endswith("/s") for line in lines)
    assert len(out.splitlines()) == 1


def test_flush_copies_what_is_not_there_the_newest_first(run_dir, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    run(capsys, "cp", step_of(run_dir, 12), f"{one}/")

    status, out, _ = run(capsys, "flush", run_dir, "--to", one, "--to", two)

    assert status == 0
    lines = out.splitlines()
    assert lines[0] == f"{step_of(one, 12)}: there already"
    assert [line.split(":")[0] for line in lines] == [
        str(step_of(to, step)) for step in (12, 3) for to in (one, two)
    ]
    for to in (one, two):
        for step in (3, 12):
            require_copy_of(step_of(run_dir, step), step_of(to, step))


def test_flush_of_the_last_leaves_the_others(run_dir, tmp_path, capsys):
    status, _, _ = run(capsys, "flush", run_dir, "--to", tmp_path / "to", "--last", "1")

    assert status == 0
    assert [e.step for e in mpickpt.checkpoints(tmp_path / "to")] == [12]


def on_nodes(run_dir, tmp_path, copies=()):
    """Return two directories, as two nodes have them, of the run's newest step."""
    source = step_of(run_dir, 12)
    manifest = mpickpt.read_manifest(source)
    nodes = {"a": [0], "b": [1]}
    disks = []
    for name, ranks in nodes.items():
        disk = tmp_path / name / source.name
        disk.mkdir(parents=True)
        kept = [*ranks, *(copies if name == "a" else ())]
        for rank in kept:
            shutil.copy(source / manifest.shards[rank].path, disk)
        tier = {"kind": "local", "nodes": nodes, "node": name}
        if 0 in ranks:
            shutil.copy(source / manifest.layout.path, disk)
        local = msgspec.structs.replace(manifest, extra={"tier": tier})
        (disk / "manifest.json").write_bytes(dump_manifest(local))
        disks.append(disk.parent)
    return disks


def test_flush_on_each_node_makes_one_copy(run_dir, tmp_path, capsys):
    disks = on_nodes(run_dir, tmp_path)
    to, statuses = tmp_path / "to", []

    def flush(disk):
        statuses.append(run(capsys, "flush", disk, "--to", to)[0])

    threads = [threading.Thread(target=flush, args=(disk,)) for disk in disks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert statuses == [0, 0]
    require_copy_of(step_of(run_dir, 12), step_of(to, 12))
    assert mpickpt.read_manifest(step_of(to, 12)).extra["tier"]["kind"] == "directory"


def test_flush_tells_what_is_left_when_a_node_is_gone(run_dir, tmp_path, capsys):
    first, second = on_nodes(run_dir, tmp_path)
    to = tmp_path / "to"

    status, out, _ = run(capsys, "flush", first, "--to", to, "--wait", "100ms")

    assert status == 6
    assert "shards of rank 1 are not there yet" in out
    require_unpublished(step_of(to, 12))
    status, out, _ = run(capsys, "flush", second, "--to", to, "--wait", "100ms")
    assert status == 0
    require_copy_of(step_of(run_dir, 12), step_of(to, 12))


def test_flush_copies_for_a_node_that_is_gone_what_its_partner_has(
    run_dir, tmp_path, capsys
):
    first, _ = on_nodes(run_dir, tmp_path, copies=[1])
    to = tmp_path / "to"

    status, _, _ = run(capsys, "flush", first, "--to", to, "--wait", "400ms")

    assert status == 0
    require_copy_of(step_of(run_dir, 12), step_of(to, 12))


def test_flush_goes_on_after_a_damaged_checkpoint(run_dir, tmp_path, capsys):
    shard = flip_byte_of_shard(step_of(run_dir, 12))

    status, out, _ = run(capsys, "flush", run_dir, "--to", tmp_path / "to")

    assert status == 3
    assert str(shard) in out
    require_copy_of(step_of(run_dir, 3), step_of(tmp_path / "to", 3))
    require_unpublished(step_of(tmp_path / "to", 12))


def test_flush_takes_a_checkpoint_that_vanishes_for_done(
    run_dir, tmp_path, capsys, monkeypatch
):
    from mpickpt.cli import flush

    found = catalog.checkpoints(run_dir)
    shutil.rmtree(step_of(run_dir, 3))
    monkeypatch.setattr(flush, "checkpoints", lambda _: found)

    status, out, _ = run(capsys, "flush", run_dir, "--to", tmp_path / "to")

    assert status == 0
    assert "removed meanwhile" in out


def test_flush_prints_json(run_dir, tmp_path, capsys):
    status, out, _ = run(capsys, "flush", run_dir, "--to", tmp_path / "to", "--json")

    assert status == 0
    found = [(entry["step"], entry["status"]) for entry in json.loads(out)]
    assert found == [(12, 0), (3, 0)]


def test_flush_of_a_run_without_checkpoints_has_nothing_to_do(tmp_path, capsys):
    (tmp_path / "run").mkdir()

    status, out, _ = run(capsys, "flush", tmp_path / "run", "--to", tmp_path / "to")

    assert status == 0
    assert "nothing to copy" in out


def test_flush_of_a_mistyped_run_is_an_error(tmp_path, capsys):
    status, _, err = run(capsys, "flush", tmp_path / "rum", "--to", tmp_path / "to")

    assert status == 4
    assert "no run directory" in err


def test_flush_to_where_nothing_can_be_written_is_unreadable(run_dir, tmp_path, capsys):
    (tmp_path / "to").write_text("a file")

    status, out, _ = run(capsys, "flush", run_dir, "--to", tmp_path / "to")

    assert status == 5
    assert str(tmp_path / "to") in out


def test_ls_tells_copies_and_how_far_they_have_come(run_dir, tmp_path, capsys):
    source, to = step_of(run_dir, 12), tmp_path / "to"
    manifest = mpickpt.read_manifest(source)
    run(capsys, "cp", step_of(run_dir, 3), f"{to}/")
    copy_shards(manifest, source, step_of(to, 12), [0])

    _, out, _ = run(capsys, "ls", to)
    _, document, _ = run(capsys, "ls", to, "--json")

    done = manifest.shards[0].nbytes / manifest.nbytes
    rows = out.splitlines()[1:]
    assert "whole" in rows[0]
    assert "directory" in rows[0]
    assert f"copying {done:.0%}" in rows[1]
    entries = json.loads(document)
    assert [entry["state"] for entry in entries] == ["whole", "copying"]
    assert [entry["copied"] for entry in entries] == [None, done]


def test_flush_fills_in_the_name_of_its_node(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", run_dir.name)
    template = run_dir.parent / "{node}"

    assert run(capsys, "flush", template, "--to", tmp_path / "far")[0] == 0

    assert mpickpt.latest(tmp_path / "far") is not None
