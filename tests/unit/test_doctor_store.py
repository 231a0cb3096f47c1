"""What `mpickpt doctor` says of a store."""

import json

import pytest

from tests.stores_double import URL, memory_store
from tests.unit.cli_runs import run


@pytest.fixture
def store(monkeypatch):
    return memory_store(monkeypatch)


def test_store_that_keeps_conditions_is_well(store, capsys):
    status, out, _ = run(capsys, "doctor", f"{URL}/run", "--quick")

    assert status == 0
    assert "conditional put       kept" in out
    assert out.splitlines()[-1] == "all is well"
    assert not store.files  # nothing is left behind


def test_store_that_ignores_conditions_is_told_of(store, capsys, monkeypatch):
    monkeypatch.setattr(type(store), "check_conditions", lambda _: False)

    status, out, _ = run(capsys, "doctor", f"{URL}/run", "--quick", "--json")

    found = json.loads(out)
    assert status == 0
    assert not found["honours_conditions"]
    assert [said["about"] for said in found["advice"]] == ["conditions"]
    assert found["put_bps"] > 0 and found["put"]["median_s"] >= 0


def test_store_that_reads_older_bytes_is_a_problem(store, capsys, monkeypatch):
    first = {}
    read = type(store).read

    def stale(self, name, *arguments):
        return first.setdefault(name, read(self, name, *arguments))[::-1]

    monkeypatch.setattr(type(store), "read", stale)

    status, out, _ = run(capsys, "doctor", f"{URL}/run", "--quick")

    assert status == 1
    assert "checkpoints here would fail or be lost: wrong bytes" in out
    assert not store.files


def test_store_that_refuses_is_an_error(store, capsys):
    store.refuse = 13

    status, _, err = run(capsys, "doctor", f"{URL}/run", "--quick")

    assert status == 5
    assert URL in err
