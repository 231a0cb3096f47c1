"""The commands that change a run: prune, pin, unpin, rm, set-metric, halt."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpickpt
from mpickpt.cli.main import main
from mpickpt.storage.halt_file import HaltFile
from mpickpt.storage.job_identity import JobIdentity
from mpickpt.storage.lease import Lease
from mpickpt.storage.lease_file import newest_claim
from mpickpt.storage.run_directory import RunDirectory
from tests.unit.cli_runs import ROOT, run
from tests.unit.runs import files_below, published, save, truncate_shard

STEPS = [1, 10, 99, 1000, 1001]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    for step in STEPS:
        save(run_dir, step, metrics={"loss": 1 / step, "note": "x"})
    return run_dir


@pytest.fixture
def run_dir(saved_run, tmp_path):
    return Path(shutil.copytree(saved_run, tmp_path / "run"))


@pytest.fixture
def held(run_dir):
    """A run that a living job writes in."""
    with Lease.acquire(run_dir, beat_s=0.3):
        yield run_dir


def rows_of(out):
    return [line.split(maxsplit=4) for line in out.splitlines()[1:]]


def test_prune_tells_a_reason_for_each_and_removes_nothing_when_dry(run_dir, capsys):
    before = files_below(run_dir)

    status, out, _ = run(
        capsys,
        *("prune", run_dir, "--keep-last", 1, "--keep-every", 1000),
        *("--keep-best", "1:loss:max", "--dry-run"),
    )

    assert status == 0
    assert [(row[0], row[3], row[4]) for row in rows_of(out)[:-1]] == [
        ("1", "keep", "best of loss (max)"),
        ("10", "remove", "no rule keeps it"),
        ("99", "remove", "no rule keeps it"),
        ("1000", "keep", "multiple of 1000"),
        ("1001", "keep", "the last"),
    ]
    assert out.splitlines()[-1].startswith("would remove 2 of 5 checkpoints, ")
    assert files_below(run_dir) == before


def test_prune_removes_what_no_rule_keeps(run_dir, capsys):
    mpickpt.set_metrics(run_dir, 99, {"loss": 5})

    status, out, _ = run(capsys, "prune", run_dir, "--keep-last", 2)

    assert status == 0
    assert published(run_dir) == [1000, 1001]
    assert "removed 3 of 5" in out
    assert not list((run_dir / ".mpickpt" / "metrics").glob("step-*"))
    assert newest_claim(run_dir).record.state == "free"


def test_prune_keeps_pinned_and_newest_good_ones(run_dir, capsys):
    run(capsys, "pin", run_dir, 1, 10)
    run(capsys, "unpin", run_dir, 10)
    truncate_shard(run_dir, 1001)

    run(capsys, "prune", run_dir, "--keep-every", 7777)

    assert published(run_dir) == [1, 1000]


def test_prune_leaves_files_of_others(run_dir, capsys):
    notes = mpickpt.step_path(run_dir, 1) / "notes.txt"
    notes.write_text("mine")

    _, out, _ = run(capsys, "prune", run_dir, "--keep-last", 1)

    assert files_below(notes.parent) == ["notes.txt"]
    assert f"{notes.parent} stays" in out


def test_prune_prints_json(run_dir, capsys):
    _, out, _ = run(capsys, "prune", run_dir, "--keep-last", 1, "--json")

    document = json.loads(out)
    assert [entry["keep"] for entry in document] == [False] * 4 + [True]
    assert document[4]["reason"] == "the last"
    assert published(run_dir) == [1001]


@pytest.mark.parametrize(
    "rules",
    [
        ["--keep-last", "0"],
        ["--keep-every", "x"],
        ["--keep-best", "3"],
        ["--keep-best", "0:loss"],
    ],
)
def test_prune_refuses_rules_that_make_no_sense(run_dir, rules):
    with pytest.raises(SystemExit) as caught:
        main(["prune", str(run_dir), *rules])

    assert caught.value.code == 2


def test_prune_without_rules_is_refused(run_dir, capsys):
    assert run(capsys, "prune", run_dir)[0] == 2
    assert published(run_dir) == STEPS


@pytest.mark.parametrize("command", ["prune", "rm"])
def test_commands_that_remove_respect_the_lease(held, command, capsys, monkeypatch):
    other = JobIdentity.current({"SLURM_JOB_ID": "7"})
    monkeypatch.setattr(JobIdentity, "current", lambda: other)
    arguments = {
        "prune": (held, "--keep-last", 1),
        "rm": (mpickpt.step_path(held, 1),),
    }

    status, _, err = run(capsys, command, *arguments[command])

    assert status == 1
    assert "one writer" in err
    assert published(held) == STEPS


def test_dry_run_needs_no_lease(held, capsys):
    assert run(capsys, "prune", held, "--keep-last", 1, "--dry-run")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("pin", "1"),
        ("unpin", "1"),
        ("halt",),
        ("set-metric", "1", "a=1"),
        ("prune", "--keep-last", "1"),
    ],
)
def test_mistyped_run_directory_is_an_error_and_not_made(tmp_path, arguments, capsys):
    command, *rest = arguments

    status, _, err = run(capsys, command, tmp_path / "typo", *rest)

    assert status == 4
    assert str(tmp_path / "typo") in err
    assert not (tmp_path / "typo").exists()


def test_pin_of_a_step_that_is_not_there_is_an_error(run_dir, capsys):
    status, _, err = run(capsys, "pin", run_dir, 7)

    assert status == 4
    assert "step-0000000007" in err


def test_ls_shows_pins_and_metrics(run_dir, capsys):
    run(capsys, "pin", run_dir, 10)
    run(capsys, "set-metric", run_dir, 10, "acc=0.5", "loss=2")

    _, out, _ = run(capsys, "ls", run_dir)

    row = out.splitlines()[2].split()
    assert row[0] == "10"
    assert row[5:] == [
        *("1", "whole", "yes", 'acc=0.5,loss=2,note="x"', "run", "step-0000000010")
    ]


def test_ls_tells_why_a_checkpoint_was_rejected(run_dir, capsys):
    RunDirectory(run_dir).reject(1001, "shard 3 is damaged")

    _, out, _ = run(capsys, "ls", run_dir, "--json")

    assert json.loads(out)[-1]["state"] == "rejected"
    assert json.loads(out)[-1]["problem"] == "shard 3 is damaged"


def test_ls_sees_a_shard_of_another_size(run_dir, capsys):
    shard = truncate_shard(run_dir, 10)

    _, out, _ = run(capsys, "ls", run_dir, "--json")

    entry = json.loads(out)[1]
    assert entry["state"] == "damaged"
    assert shard.name in entry["problem"]


@pytest.mark.parametrize("metric", ["a", "=1", "a=x", "a=nan", "a=inf"])
def test_set_metric_takes_numbers(run_dir, metric):
    with pytest.raises(SystemExit) as caught:
        main(["set-metric", str(run_dir), "1", metric])

    assert caught.value.code == 2


def test_halt_comes_and_goes(run_dir, capsys):
    _, out, _ = run(capsys, "halt", run_dir, "--reason", "cooling fails")

    assert HaltFile(run_dir).reason == "cooling fails"
    assert "--clear" in out

    run(capsys, "halt", run_dir, "--clear")

    assert not HaltFile(run_dir).exists


def test_rm_removes_checkpoints(run_dir, capsys, monkeypatch):
    monkeypatch.chdir(run_dir)

    status, _, _ = run(capsys, "rm", "step-0000000001", run_dir / "step-0000000099/")

    assert status == 0
    assert published(run_dir) == [10, 1000, 1001]


@pytest.mark.parametrize("why", ["pinned", "newest good"])
def test_rm_takes_none_where_one_may_not_go(run_dir, why, capsys):
    protected = 1 if why == "pinned" else 1000
    run(capsys, "pin", run_dir, 1)
    truncate_shard(run_dir, 1001)
    paths = [mpickpt.step_path(run_dir, step) for step in (10, protected)]

    status, _, err = run(capsys, "rm", *paths)

    assert status == 2
    assert why in err
    assert "--force" in err
    assert published(run_dir) == STEPS
    assert run(capsys, "rm", *paths, "--force")[0] == 0
    assert not {10, protected} & set(published(run_dir))
    assert protected not in RunDirectory(run_dir).pins()


def test_rm_takes_rejected_and_unfinished_ones(run_dir, capsys):
    rejected = RunDirectory(run_dir).reject(1001, "")
    unfinished = mpickpt.step_path(run_dir, 2000)
    unfinished.mkdir()
    (unfinished / "rank00000-0123abcd.h5.tmp").write_text("")

    status, _, _ = run(capsys, "rm", rejected, unfinished)

    assert status == 0
    assert not rejected.exists()
    assert not unfinished.exists()
    assert os.listdir(run_dir / ".mpickpt" / "rejected") == []


def test_rm_takes_a_checkpoint_that_is_of_no_run(run_dir, tmp_path, capsys):
    path = tmp_path / "final"
    mpickpt.step_path(run_dir, 1).rename(path)

    assert run(capsys, "rm", path)[0] == 0

    assert not path.exists()
    assert not (tmp_path / ".mpickpt").exists()


@pytest.mark.parametrize("name", ["absent", ".", "step-0000000007"])
def test_rm_of_what_is_no_checkpoint_is_an_error(run_dir, name, capsys):
    status, _, err = run(capsys, "rm", run_dir / name)

    assert status == 4
    assert "no checkpoint" in err
    assert published(run_dir) == STEPS


def test_commands_import_neither_mpi_nor_hdf5(run_dir):
    program = (
        "import sys\n"
        "from mpickpt.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not {'h5py', 'mpi4py', 'rich'} & set(sys.modules)\n"
    )

    for command in ("prune --keep-last 2", "halt"):
        name, *rest = command.split()
        result = subprocess.run(
            [sys.executable, "-c", program, name, run_dir, *rest],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr


def test_prune_by_a_metric_that_nobody_has_removes_nothing(run_dir, capsys):
    status, _, err = run(capsys, "prune", run_dir, "--keep-best", "1:lost")

    assert status == 2
    assert "no checkpoint has the metric 'lost'" in err
    assert published(run_dir) == STEPS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prune", "run", "--keep-last", "0"], "'0': expected a whole number, 1"),
        (["prune", "run", "--keep-best", "3"], "'3': expected N:METRIC"),
        (["pin", "run", "last"], "'last': expected a whole number, 0"),
        (["set-metric", "run", "1", "loss=low"], "'loss=low': expected NAME=VALUE"),
        (["ls", ""], "the path is empty"),
    ],
)
def test_wrong_argument_is_told_with_what_was_expected(capsys, arguments, said):
    with pytest.raises(SystemExit) as end:
        main(arguments)

    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_manifest_stands_for_its_checkpoint(tmp_path, capsys):
    mpickpt.save_sharded({}, tmp_path / "step-0000000001", step=1)
    manifest = tmp_path / "step-0000000001" / "manifest.json"

    assert run(capsys, "verify", manifest)[0] == 0
    assert run(capsys, "show", manifest)[0] == 0


def test_where_run_and_checkpoint_are_mistaken(tmp_path, capsys):
    checkpoint = tmp_path / "step-0000000001"
    mpickpt.save_sharded({}, checkpoint, step=1)

    _, out, _ = run(capsys, "ls", checkpoint)
    _, _, err = run(capsys, "rm", tmp_path)

    assert f"which is one itself, of the run {tmp_path}" in out
    assert f"it is a run directory that holds 1; the latest is {checkpoint}" in err
