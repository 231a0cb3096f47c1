"""States of JAX that span the processes of a job: jax.distributed under mpiexec."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.mpi_launch import finish, start

pytest.importorskip("jax")

PROGRAM = str(Path(__file__).parent / "programs/jax_processes.py")
LIKES = ("arrays", "described")
TIMEOUT_S = 120


def run(size, *commands):
    """Run commands one after the other; return the lines that they printed."""
    job = start(
        ["-m", "mpi4py", PROGRAM, *commands],
        size=size,
        python=sys.executable,
        environ={"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
    )
    outcome = finish(job, TIMEOUT_S)
    assert outcome.returncode == 0, outcome.output
    words = ("saved", "same", "refused", "from")
    return [line for line in outcome.output.splitlines() if line.startswith(words)]


def test_processes_load_onto_any_mesh(tmp_path):
    path = tmp_path / "c"
    meshes = ("2x2", "4x1", "1x4")
    loads = [f"load:{path}:{mesh}:{like}" for mesh in meshes for like in LIKES]

    lines = run(2, f"save:{path}:2x2", *loads)

    assert lines == ["saved"] + ["same [0, 1]"] * len(loads)


def test_other_numbers_of_processes_load_what_was_saved(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    run(2, f"save:{two}:4x1")

    in_one = run(1, f"load:{two}:2x2", f"save:{one}:1x4")
    in_four = run(4, f"load:{one}:2x2", f"load:{two}:1x4")

    assert in_one == ["same [0]", "saved"]
    assert in_four == ["same [0, 0, 0, 0]"] * 2


def test_local_arrays_that_differ_or_are_gone_are_refused_on_all_ranks(tmp_path):
    refused = run(2, f"local:{tmp_path}/c")

    assert refused[:2] == ["refused w"] * 2
    assert "[rank 1" in refused[2]
    assert "'gone': was deleted or donated" in refused[2]
    assert "'w': spans several processes" in refused[3]


def test_training_goes_on_to_the_same_bits_and_on_another_number(tmp_path):
    broken, copied = tmp_path / "broken", tmp_path / "copied"
    unbroken, _ = run(2, f"train:{tmp_path}/unbroken:6", f"train:{broken}:3")
    shutil.copytree(broken, copied)

    (resumed,) = run(2, f"train:{broken}:6")
    (in_one,) = run(1, f"train:{copied}:5")

    assert unbroken.startswith("from 0 ")
    assert resumed == unbroken.replace("from 0 ", "from 3 ")
    assert in_one.startswith("from 3 ")
