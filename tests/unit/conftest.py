"""Common to the unit tests of readers: the checkpoint of four ranks, and a copy."""

import shutil

import pytest

from mpickpt.storage import second_look
from tests.unit.saved_checkpoint import save


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "step-0000000007"
    save(path)
    return path


@pytest.fixture
def copied(saved, tmp_path):
    path = tmp_path / saved.name
    shutil.copytree(saved, path)
    return path


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    # What tests damage is new: the library would wait for it to come from elsewhere.
    monkeypatch.setattr(second_look, "PATIENCE_S", 0.02)
