"""What importing the package imports: neither MPI nor HDF5, which may be missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpickpt
from tests.crash.small_state import save

REPOSITORY = Path(mpickpt.__file__).parents[1]
FOREIGN = ["mpi4py", "h5py", "torch", "jax", "rich", "ml_dtypes"]

BLOCKER = """
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mpi4py", "h5py"):
            raise ImportError(f"{name} does not work on this login node")

sys.meta_path.insert(0, Blocker())
"""


def run_python(code, *arguments):
    finished = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with two checkpoints of two ranks."""
    run = tmp_path_factory.mktemp("run")
    for step in (3, 12):
        save(run / f"step-{step:010d}", step=step, size=2)
    return run


def imported_by(code):
    listing = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(run_python(f"{code}\n{listing}").splitlines()[-1])
    return {name.partition(".")[0] for name in modules}


def test_import_takes_nothing_but_the_package_itself():
    found = imported_by("import mpickpt")

    assert not found & {*FOREIGN, "numpy", "msgspec", "zlib_ng"}


@pytest.mark.parametrize("name", mpickpt.__all__)
def test_public_name_is_there_without_mpi_and_hdf5(name):
    assert getattr(mpickpt, name).__name__ == name
    assert name in dir(mpickpt)


def test_public_names_import_neither_mpi_nor_hdf5():
    reading = ["checkpoints", "latest", "open_checkpoint", "read_manifest", "Sharded"]
    names = [*reading, "load_sharded", "CheckpointError"]

    found = imported_by(f"from mpickpt import {', '.join(names)}")

    assert not found & {"mpi4py", "h5py", "rich", "torch", "jax"}


def test_loading_alone_imports_neither_mpi_nor_hdf5(run):
    path = run / "step-0000000012"
    code = f"""
import mpickpt
with mpickpt.open_checkpoint({str(path)!r}) as opened:
    opened.load()
mpickpt.load_sharded({str(path)!r}, reshard=True, only=["model/*"])
"""

    assert not imported_by(code) & {"mpi4py", "h5py", "rich"}


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["latest"], ["show"], ["verify"], ["verify", "--json"]],
    ids=" ".join,
)
def test_command_works_where_mpi_and_hdf5_cannot_be_imported(run, arguments):
    path = run / "step-0000000012" if arguments == ["show"] else run
    call = "from mpickpt.cli.main import main\nsys.exit(main(sys.argv[1:]))"

    printed = run_python(BLOCKER + call, *arguments, path)

    assert "12" in printed


def test_reading_works_where_mpi_and_hdf5_cannot_be_imported(run):
    code = """
import mpickpt
path = mpickpt.latest(sys.argv[1])
with mpickpt.open_checkpoint(path) as opened:
    print(opened["step"], opened["model", "w"].shape, len(opened.keys()))
print(mpickpt.load_sharded(path, reshard=True, only=["step"]))
"""

    printed = run_python(BLOCKER + code, run)

    assert printed.splitlines() == ["12 (2000, 4) 8", "{'step': 12}"]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'save_everything'"):
        mpickpt.save_everything  # noqa: B018
