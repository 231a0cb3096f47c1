"""Torch's parallelisms under mpiexec: each layout loads into each other, bit for bit.

Few programs do all, because torch takes its time to be imported on every rank.
"""

import sys
from pathlib import Path

import pytest

from tests.mpi_launch import finish, start

pytest.importorskip("torch")

PROGRAM = str(Path(__file__).parent / "programs/torch_ranks.py")
TIMEOUT_S = 280
WAYS = ("fsdp2", "bfloat16", "hsdp", "tp-fsdp2", "ddp")
SAME = [f"{way}>{way}" for way in WAYS]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def run(size, folder, *commands):
    """Run commands one after the other on so many ranks, and have them succeed."""
    arguments = [f"{command}:{folder}" for command in commands]
    job = start(["-m", "mpi4py", PROGRAM, *arguments], size=size, python=sys.executable)
    outcome = finish(job, TIMEOUT_S)
    assert outcome.returncode == 0, outcome.output
    done = [line for line in outcome.output.splitlines() if line.startswith("done")]
    assert len(done) == len(commands), outcome.output


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What four ranks saved, each way, and loaded again; they trained on after it."""
    folder = tmp_path_factory.mktemp("four")
    saves = [f"save:{way}" for way in WAYS]
    run(4, folder, *saves, *(f"load:{pair}" for pair in SAME))
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two ranks saved."""
    folder = tmp_path_factory.mktemp("two")
    run(2, folder, "save:fsdp2", "save:tp-fsdp2")
    return folder


def test_same_ranks_resume_to_the_same_bits(four):
    assert all((four / way / "manifest.json").exists() for way in WAYS)


def test_fewer_ranks_load_every_layout(four):
    others = ("tp-fsdp2>fsdp2", "ddp>fsdp2", "fsdp2>ddp")

    run(2, four, *(f"load:{pair}" for pair in (*SAME, *others)))


def test_one_rank_loads_every_layout_into_a_plain_model(four):
    loads = [f"load:{way}>plain" for way in WAYS if way != "bfloat16"]

    run(1, four, *loads, "load:hsdp>fsdp2", "leaves:")


def test_more_ranks_load_what_fewer_saved_into_other_layouts(two):
    pairs = ("fsdp2>fsdp2", "tp-fsdp2>tp-fsdp2", "fsdp2>hsdp", "tp-fsdp2>ddp")

    run(4, two, *(f"load:{pair}" for pair in pairs), "leaves:", "again:fsdp2")


def test_what_cannot_be_saved_is_the_same_error_on_all_ranks(tmp_path):
    run(2, tmp_path, "refuse:", "own:")
