"""`mpickpt doctor` by all ranks: rank 0 speaks, and all have its status."""

import json

import pytest

from mpickpt.cli.main import main
from mpickpt.storage import commit, probes


def doctor(*arguments):
    return main(["doctor", *map(str, arguments), "--quick"])


def test_rank_0_prints_one_report(comm, shared_tmp_path, capsys):
    status = doctor(shared_tmp_path, "--json")

    out = capsys.readouterr().out
    assert (out != "") == (comm.rank == 0)
    assert len(set(comm.allgather(status))) == 1
    comm.Barrier()
    assert not [*shared_tmp_path.iterdir()]
    if comm.rank == 0:
        ranks = json.loads(out)["ranks"]
        assert ranks["n_ranks"] == comm.size
        assert sum(count for _, count in ranks["ranks_per_host"]) == comm.size
        assert ranks["thread_level"].startswith("MPI_THREAD_")
        assert ranks["total_write_bps"] >= ranks["slowest_write_bps"] > 0
        assert not ranks["hosts_without"]


def test_report_has_the_ranks(comm, shared_tmp_path, capsys):
    doctor(shared_tmp_path)

    if comm.rank == 0:
        lines = capsys.readouterr().out.splitlines()
        assert "what the ranks see" in lines
        assert any("all write at once" in line for line in lines)


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_no_directory_is_every_rank_s_status(comm, shared_tmp_path, capsys, name):
    if comm.rank == 0:
        (shared_tmp_path / "file").touch()
    comm.Barrier()

    assert doctor(shared_tmp_path / name) == 2
    assert ("not a directory" in capsys.readouterr().err) == (comm.rank == 0)


def test_what_fails_on_one_rank_is_every_rank_s_status(
    comm, shared_tmp_path, capsys, monkeypatch
):
    def fail(_):
        raise OSError(5, "Input/output error")

    if comm.rank == 0:
        monkeypatch.setattr(commit.os, "fsync", fail)

    assert doctor(shared_tmp_path) == 1
    comm.Barrier()
    assert not [*shared_tmp_path.iterdir()]


def test_error_of_one_rank_alone_is_in_the_report(
    comm, shared_tmp_path, capsys, monkeypatch
):
    def fail(*_):
        raise OSError(28, "No space left on device")

    last = comm.size - 1
    if comm.rank == last:
        monkeypatch.setattr("mpickpt.doctor.together.measured_write_bps", fail)

    doctor(shared_tmp_path, "--json")

    if comm.rank == 0:
        found = json.loads(capsys.readouterr().out)
        assert ("write", "ENOSPC") in {
            (each["probe"], each["errno"]) for each in found["failures"]
        }
        assert found["ranks"]["total_write_bps"] is None


def test_probe_that_fails_everywhere_is_said_once(
    comm, shared_tmp_path, capsys, monkeypatch
):
    def refuse(_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(probes, "probe_locks", refuse)

    doctor(shared_tmp_path, "--json")

    if comm.rank == 0:
        failures = json.loads(capsys.readouterr().out)["failures"]
        assert [each["probe"] for each in failures] == ["locks"]
