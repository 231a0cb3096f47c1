import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mpickpt
from mpickpt.cli.main import main
from mpickpt.cli.output import nbytes_text, shown
from mpickpt.format.naming import MANIFEST_NAME
from tests.unit.cli_runs import ROOT, flip_byte_of_shard, run, save


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("saved")
    for step in (7, 12):
        save(mpickpt.step_path(run_dir, step), step=step, metadata={"seed": 1})
    return run_dir


@pytest.fixture
def run_dir(saved_run, tmp_path):
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.fixture
def checkpoint(run_dir):
    return mpickpt.step_path(run_dir, 12)


def test_ls_lists_what_is_there_in_order_of_step(run_dir, capsys):
    (run_dir / "step-0000000020").mkdir()
    (run_dir / "step-0000000021").mkdir()
    os.utime(run_dir / "step-0000000021", (1e9, 1e9))
    shutil.copytree(
        mpickpt.step_path(run_dir, 7), run_dir / "step-0000000008.rejected-0123abcd"
    )
    incomplete = run_dir / "step-0000000009"
    shutil.copytree(mpickpt.step_path(run_dir, 7), incomplete)
    (incomplete / mpickpt.read_manifest(incomplete).shards[1].path).unlink()
    damaged = run_dir / "step-0000000010"
    damaged.mkdir()
    (damaged / MANIFEST_NAME).write_text("{}")

    status, out, _ = run(capsys, "ls", run_dir)

    rows = [line.split() for line in out.splitlines()]
    assert " ".join(rows[0]) == (
        "step age size ranks state pinned metrics tier directory"
    )
    assert [(row[0], row[-5]) for row in rows[1:]] == [
        ("7", "whole"),
        ("8", "rejected"),
        ("9", "damaged"),
        ("10", "damaged"),
        ("12", "whole"),
        ("20", "saving"),
        ("21", "unfinished"),
    ]
    assert status == 0


def test_ls_prints_json(run_dir, capsys):
    status, out, _ = run(capsys, "ls", run_dir, "--json")

    entries = json.loads(out)
    assert [entry["step"] for entry in entries] == [7, 12]
    assert entries[0]["world_size"] == 2
    assert status == 0


@pytest.mark.parametrize("command", ["ls", "latest", "verify", "show"])
def test_run_without_checkpoints_has_a_status_of_its_own(tmp_path, command, capsys):
    status, out, err = run(capsys, command, tmp_path / "absent")

    assert status == 4
    assert str(tmp_path / "absent") in out + err


def test_latest_prints_one_path(run_dir, capsys):
    status, out, _ = run(capsys, "latest", run_dir)

    assert (status, out) == (0, f"{run_dir}/step-0000000012\n")


def test_show_tells_what_a_checkpoint_holds(checkpoint, capsys):
    status, out, _ = run(capsys, "show", checkpoint)

    assert status == 0
    assert "step      12" in out
    assert "saved by  2 ranks, hdf5 " in out
    lines = [line.split() for line in out.splitlines()]
    assert ["model/w", "sharded", "float32", "[8,", "3]", "96", "B"] in lines
    assert ["chain", "per_rank", "int64", "by", "rank", "-"] in lines
    assert "  seed: 1" in out.splitlines()


def test_show_prints_the_manifest_as_json(checkpoint, capsys):
    _, out, _ = run(capsys, "show", checkpoint, "--json")

    document = json.loads(out)
    assert document["world_size"] == 2
    assert document["nbytes"] == sum(shard["nbytes"] for shard in document["shards"])


def test_show_escapes_what_could_steer_a_terminal(tmp_path, capsys):
    path = tmp_path / "c"
    mpickpt.save_sharded({}, path, step=1, metadata={"a": "\x1b[2J", "\x07": 1})

    _, out, _ = run(capsys, "show", path)

    assert "\x1b" not in out
    assert "\x07" not in out


def test_verify_says_whole(run_dir, capsys):
    status, out, _ = run(capsys, "verify", run_dir, "--jobs", 2)

    assert status == 0
    assert [line.split(": ")[1][:5] for line in out.splitlines()] == ["whole"] * 2


@pytest.mark.parametrize("options", [[], ["--fast"]])
def test_verify_names_shard_block_and_arrays(checkpoint, options, capsys):
    shard = flip_byte_of_shard(checkpoint)

    status, out, _ = run(capsys, "verify", checkpoint, *options)

    assert status == 3
    assert shard.name in out
    assert "block 0" in out
    assert "model/w" in out


def test_verify_goes_through_a_run_and_prints_json(run_dir, checkpoint, capsys):
    flip_byte_of_shard(checkpoint)
    (mpickpt.step_path(run_dir, 7) / MANIFEST_NAME).write_text("{}")

    status, out, _ = run(capsys, "verify", run_dir, "--json")

    first, second = json.loads(out)
    assert status == first["status"] == second["status"] == 3
    assert "schema_version" in first["problem"]
    assert second["files"][0]["damaged_blocks"][0]["number"] == 0


def test_verify_tells_unreadable_from_damaged(checkpoint, capsys):
    shard = checkpoint / mpickpt.read_manifest(checkpoint).shards[0].path
    outside = checkpoint.parent / "outside"
    shard.rename(outside)
    shard.symlink_to(outside)

    status, out, _ = run(capsys, "verify", checkpoint)

    assert status == 5
    assert "unreadable" in out


def test_verify_names_what_a_crash_left(checkpoint, capsys):
    (checkpoint / "rank00000-00000000.h5.tmp").write_text("")

    status, out, _ = run(capsys, "verify", checkpoint)

    assert status == 0
    assert "rank00000-00000000.h5.tmp" in out


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["verify", ".", "--jobs", "0"]]
)
def test_wrong_usage_ends_with_two(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert "usage: mpickpt" in capsys.readouterr().err


def test_interrupt_and_broken_pipe_are_quiet(run_dir, monkeypatch, capsys):
    from mpickpt.cli import ls

    def interrupted(run_dir):
        raise KeyboardInterrupt

    monkeypatch.setattr(ls, "named_steps", interrupted)

    assert run(capsys, "ls", run_dir) == (130, "", "")


def python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_closed_pipe_gives_no_traceback(checkpoint):
    command = shlex.join([sys.executable, "-m", "mpickpt", "show", str(checkpoint)])
    result = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.stderr == ""
    assert result.returncode in (0, 141)


def test_module_runs_as_the_program(run_dir):
    assert python("-m", "mpickpt", "--version").stdout.startswith("mpickpt ")
    assert python("-m", "mpickpt", "latest", run_dir).returncode == 0


def test_path_of_no_encoding_leaves_as_it_came(run_dir):
    odd = os.fsencode(run_dir.parent) + b"/\xff"
    run_dir.rename(os.fsdecode(odd))

    result = subprocess.run(
        [sys.executable, "-m", "mpickpt", "latest", odd],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | {"LC_ALL": "C.UTF-8"},
    )

    assert result.stdout == odd + b"/step-0000000012\n"


def test_ls_of_a_hundred_checkpoints_is_fast_and_imports_little(run_dir):
    for step in range(100, 198):
        shutil.copytree(mpickpt.step_path(run_dir, 7), mpickpt.step_path(run_dir, step))
    program = (
        "import sys\n"
        "from mpickpt.cli.main import main\n"
        f"status = main(['ls', {str(run_dir)!r}])\n"
        "assert not {'h5py', 'mpi4py', 'rich'} & set(sys.modules)\n"
        "sys.exit(status)\n"
    )

    start = time.perf_counter()
    result = python("-c", program)
    seconds = time.perf_counter() - start

    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 101
    # 0.5 s on an idle machine; others may be at work on this one.
    assert seconds < 3


def test_terminal_gets_a_table(run_dir, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)

    status, out, _ = run(capsys, "ls", run_dir)

    assert status == 0
    assert "step-0000000012" in out


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**40, "1.0 TiB"), (None, "?")],
)
def test_sizes_are_for_people(nbytes, text):
    assert nbytes_text(nbytes) == text


def test_shown_text_keeps_the_bytes_of_paths():
    assert shown("a\udcffb\nc\ud800") == "a\udcffb\\nc\\ud800"
