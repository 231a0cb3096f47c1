"""`mpickpt doctor` in one process: what it prints, its status, what it leaves."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager

import pytest

from mpickpt.bench import ground
from mpickpt.cli.main import main
from mpickpt.doctor import command, versions
from mpickpt.doctor.asking import Asking
from mpickpt.doctor.report import document, print_report
from mpickpt.errors import StorageError
from mpickpt.parallel import mpi_facts
from mpickpt.planning.advice import advise
from mpickpt.storage import commit, probes
from tests.lustre_like.layout_bytes import Plain
from tests.lustre_like.standin import lustre_like, why_not
from tests.unit.findings import DELAY, TWO_NODES, failure, findings

DEADLINE_S = 30
MIB = 1 << 20
# What a number in the JSON is counted in, by the end of its name.
UNITS = ("_s", "nbytes", "_bps", "_per_s")
COUNTS = (
    *("count", "n_opened", "n_failed", "n_missed", "n_files", "free_inodes"),
    *("used_files", "limit_files", "n_osts", "fullest_ost", "magic"),
    *("n_ranks", "ranks_per_host", "n_listed", "n_missing", "n_processes"),
)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher has started this process, whatever other tests have imported."""
    monkeypatch.setattr(command, "is_launched", lambda: False)
    monkeypatch.setattr(versions, "mpi_name_in_other_process", lambda: "Some MPI 1.0")


def doctor(*arguments):
    return main(["doctor", *map(str, arguments), "--quick"])


def told(capsys, *arguments):
    """Return the exit status and the JSON."""
    status = doctor(*arguments, "--json")
    return status, json.loads(capsys.readouterr().out)


def numbers_of(value, name=""):
    """Yield (name, number) of every number in a JSON document."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_of(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_of(inner, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def test_sections_tell_of_place_behaviour_and_speed(tmp_path, capsys):
    assert doctor(tmp_path) in (0, 1)

    lines = capsys.readouterr().out.splitlines()
    for title in (
        "file system",
        "what it does",
        "how fast one process is",
        "versions",
    ):
        assert title in lines
    assert str(tmp_path) in lines[0]
    assert max(map(len, lines)) <= 100
    labels = {line[2:22].strip() for line in lines if line.startswith("  ")}
    assert {"kind", "free space", "rename", "write", "read", "h5py"} <= labels


def test_nothing_is_left_and_nothing_foreign_is_touched(tmp_path, capsys):
    foreign = tmp_path / ".mpickpt-doctor-of-mine"
    foreign.write_text("mine")

    doctor(tmp_path)

    assert [*tmp_path.iterdir()] == [foreign]
    assert foreign.read_text() == "mine"


def test_a_place_in_memory_is_status_1(small_disk, capsys):
    status, found = told(capsys, small_disk)

    assert status == 1
    assert not found["is_well"]
    assert found["place"]["file_system"]["kind"] == "tmpfs"
    assert found["advice"][0]["about"] == "memory"


def test_all_is_well(capsys):
    print_report(findings(), (), as_json=False)

    assert capsys.readouterr().out.splitlines()[-1] == "all is well"


def test_status_says_which_problems(capsys):
    found = findings(tried={"creates_exclusively": False})

    print_report(found, advise(found), as_json=False)

    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "checkpoints here would fail or be lost: exclusive create"
    assert any(line.startswith("PROBLEM: ") for line in said)
    assert any(line.startswith("  why: ") for line in said)
    assert any(line.startswith("  do:  ") for line in said)


def test_report_of_two_nodes_fits_and_names_them(capsys):
    ranks = {
        "ranks": TWO_NODES,
        "failures": (failure("locks"),),
        "checkpoint_nbytes": 10**12,
    }

    print_report(findings(**ranks), (), as_json=False)

    out = capsys.readouterr().out
    assert "4, 2 on each of 2 nodes: n0, n1" in out
    assert f"{DELAY.change:22}seen at once by all 6" in out
    assert "n0: cannot locks (EIO)" in out
    assert "4.17 min for 4 ranks" in out
    assert max(map(len, out.splitlines())) <= 100


def test_what_was_not_found_out_is_said(capsys):
    nothing = dict.fromkeys(findings().tried.__slots__)

    print_report(findings(tried=nothing, place={"space": None}), (), as_json=False)

    assert capsys.readouterr().out.count("could not be found out") >= 9


def test_every_figure_has_its_unit_in_its_name(tmp_path, capsys):
    _, found = told(capsys, tmp_path, "--nbytes", "1GB")
    of_ranks = document(findings(ranks=TWO_NODES), ())

    for name, _ in [*numbers_of(found), *numbers_of(of_ranks)]:
        assert name.endswith(UNITS) or name in COUNTS, name


def test_json_has_what_was_found(tmp_path, capsys):
    _, found = told(capsys, tmp_path, "--nbytes", "1GB")

    assert found["directory"] == str(tmp_path)
    assert found["checkpoint_nbytes"] == 10**9
    assert found["tried"]["renaming"]["replaces"] is True
    assert found["tried"]["speed"]["write_bps"] > 0
    assert found["versions"]["mpi"] == "Some MPI 1.0"
    assert found["ranks"] is None
    assert {"about", "is_grave", "what", "why", "remedy"} <= {
        key for advice in found["advice"] for key in advice
    } or not found["advice"]


def test_quick_is_quick(tmp_path, capsys):
    begin = time.monotonic()

    doctor(tmp_path)

    # Promised are 3 s; the machine of the tests may have much else to do.
    assert time.monotonic() - begin < 12


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_no_directory_is_wrong_usage(tmp_path, capsys, name):
    (tmp_path / "file").touch()

    assert doctor(tmp_path / name) == 2
    assert "is not a directory" in capsys.readouterr().err


def test_size_that_is_none_is_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor(tmp_path, "--nbytes", "much")

    assert ended.value.code == 2


def test_directory_that_cannot_be_written_is_status_5(tmp_path, capsys, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)

    assert doctor(tmp_path) == 5
    said = capsys.readouterr().err
    assert f"cannot write in {tmp_path}: Read-only file system" in said


def test_failed_sync_is_a_finding(tmp_path, capsys, monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(commit.os, "fsync", fail)

    status, found = told(capsys, tmp_path)

    assert status == 1
    errors = {(each["probe"], each["errno"]) for each in found["failures"]}
    assert {("sync", "EIO"), ("directory sync", "EIO")} <= errors
    assert {"sync", "directory sync"} <= {each["about"] for each in found["advice"]}
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("small_disk", ["128k"], indirect=True)
def test_full_disk_is_a_finding(small_disk, capsys):
    (small_disk / "full").write_bytes(bytes(100 << 10))

    status, found = told(capsys, small_disk)

    assert status == 1
    assert "ENOSPC" in {each["errno"] for each in found["failures"]}
    assert [path.name for path in small_disk.iterdir()] == ["full"]


def test_probe_that_never_ends_is_a_finding(tmp_path, capsys, monkeypatch):
    left, forever = [], threading.Event()
    monkeypatch.setattr(probes, "probe_locks", lambda _: forever.wait())
    monkeypatch.setattr(command, "_QUICK_LIMIT_S", 0.5)
    monkeypatch.setattr(command, "leave", left.append)

    status, found = told(capsys, tmp_path)
    forever.set()

    assert (status, left) == (1, [1])
    assert "locks hangs" in {each["about"] for each in found["advice"]}
    assert ("locks", "no answer within 0.5 s") in {
        (each["probe"], each["text"]) for each in found["failures"]
    }
    assert found["tried"]["clock_skew_s"] is not None


def test_asking_raises_what_is_no_refusal():
    with pytest.raises(ZeroDivisionError):
        Asking().ask("division", lambda: 1 / 0)


def test_asking_notes_what_is_refused():
    def refuse():
        raise StorageError("cannot look", errno=errno.EACCES)

    asking = Asking()

    assert asking.ask("look", refuse) is None
    (noted,) = asking.failures
    assert (noted.probe, noted.errno, noted.text) == ("look", "EACCES", "cannot look")


KILLED = """
import sys, time
from mpickpt.storage import probes
probes.probe_clock = lambda _: time.sleep(60)
from mpickpt.cli.main import main
main(["doctor", sys.argv[1], "--quick"])
"""


def test_nothing_is_left_when_it_is_killed(tmp_path):
    program = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    wait_until(lambda: [*tmp_path.glob(".mpickpt-doctor-*/exclusive")])

    program.kill()
    program.wait()

    wait_until(lambda: not [*tmp_path.iterdir()])
    assert not [*tmp_path.iterdir()]


def wait_until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def test_directory_is_left_to_the_watcher_when_it_cannot_be_removed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ground.shutil, "rmtree", lambda *_, **__: None)

    with ground.scratch_directory(tmp_path, ".own-") as path:
        pass

    assert path.exists()  # the watcher waits for this process to end


@contextmanager
def launched(monkeypatch, **environ):
    for name in ("PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "is_launched", lambda: True)
    yield


def without_mpi():
    raise ImportError("libmpi.so.40: cannot open shared object file")


def test_launcher_without_mpi_is_a_finding(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "world", without_mpi)
    with launched(monkeypatch, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0"):
        status, found = told(capsys, tmp_path)

    assert status == 1
    assert found["split"] == {"variable": "OMPI_COMM_WORLD_SIZE", "n_processes": 2}
    assert {"launcher", "MPI"} <= {each["about"] for each in found["advice"]}


def test_only_one_process_of_a_split_launch_speaks(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "world", without_mpi)
    with launched(monkeypatch, OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1"):
        assert doctor(tmp_path) == 1

    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("environ", "is_launched"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, False),  # a batch script
        ({"PMI_RANK": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"PMIX_RANK": "0"}, True),
    ],
)
def test_launchers_are_told_by_their_variables(environ, is_launched, monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)

    assert mpi_facts.is_launched(environ) == is_launched


def test_mpi_is_named_without_starting_it():
    pytest.importorskip("mpi4py")

    assert mpi_facts.mpi_name_in_other_process()


def test_layout_of_lustre_is_judged(tmp_path, capsys, monkeypatch):
    if reason := why_not():
        pytest.skip(reason)
    pytest.importorskip("mfusepy")
    with lustre_like(tmp_path / "lustre") as stand_in:
        folder = stand_in.install_lfs("works")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        (stand_in.point / "run").mkdir()
        stand_in.set_layout(stand_in.point / "run", Plain(count=-1, size=MIB).pack())

        status, found = told(capsys, stand_in.point / "run")

        assert found["place"]["file_system"]["kind"] == "lustre"
        stripes = found["place"]["stripes"]
        assert stripes["layout"] == "all OSTs in stripes of 1 MiB"
        assert stripes["n_osts"] == 8
        assert "stripes" in {each["about"] for each in found["advice"]}
        assert status == 0
        assert not [*(stand_in.point / "run").iterdir()]
