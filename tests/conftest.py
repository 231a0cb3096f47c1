"""Common to all tests: every run starts without the user's MPICKPT settings."""

import os
import subprocess

import pytest

from tests.mpi_launch import MPI_ENVIRONMENT

for name, value in MPI_ENVIRONMENT.items():
    os.environ.setdefault(name, value)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("MPICKPT_") and not name.startswith("MPICKPT_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture
def small_disk(request, tmp_path):
    """A file system of its own, of 4 MiB or of what the test's parameter says."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    point = tmp_path / "disk"
    point.mkdir()
    size = f"size={getattr(request, 'param', '4m')}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "none", str(point)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)
