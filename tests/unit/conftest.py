"""Common to the unit tests of readers: the checkpoint of four ranks, and a copy."""

import shutil

import pytest

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
