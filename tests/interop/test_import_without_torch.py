"""Imports where torch and the systems that wrote the sources cannot be imported."""

import os
import subprocess
import sys

import pytest

from tests.interop.hostile import tree_of
from tests.unit.cli_runs import ROOT

pytest.importorskip("torch")
from tests.interop.foreign_samples import SAMPLES

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

FOREIGN = "torch", "deepspeed", "megatron", "nemo", "safetensors", "jax", "mpi4py"

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FOREIGN:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocker())
from mpickpt.cli.main import main
status = main(sys.argv[1:])
assert not set(FOREIGN) & set(sys.modules), sorted(set(FOREIGN) & set(sys.modules))
sys.exit(status)
"""


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_import_needs_no_framework(name, tmp_path):
    kind, make = SAMPLES[name]
    make(tmp_path / "source")

    done = run_python("import", kind, tmp_path / "source", tmp_path / "out")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'out'}: step ")
    assert "model" in tree_of(tmp_path / "out")


@pytest.mark.parametrize("kind", ["dcp", "deepspeed", "nemo"])
def test_import_of_what_is_not_there_names_it(kind, tmp_path):
    done = run_python("import", kind, tmp_path / "nowhere", tmp_path / "out")

    assert done.returncode == 4
    assert done.stderr.startswith("mpickpt: ")
    assert str(tmp_path / "nowhere") in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["dcp", "deepspeed", "nemo"])
def test_import_of_what_is_no_checkpoint_names_it(kind, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "notes.txt").write_text("nothing")

    done = run_python("import", kind, source, tmp_path / "out")

    assert done.returncode == 4
    assert str(source) in done.stderr
    assert not (tmp_path / "out").exists()
