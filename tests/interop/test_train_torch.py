"""The example of PyTorch: killed and resumed, with the bits of an unbroken run."""

import re
import shutil
import sys

import pytest

from tests.mpi_launch import finish, start

pytest.importorskip("torch", minversion="2.6")

PROGRAM = "examples/train_torch.py"
STEPS = 8
SIZE = 2
TIMEOUT_S = 120


def run(size, run_dir, *options):
    """Run the example on so many ranks; return how it ended."""
    arguments = ["--steps", str(STEPS), "--every", "4", "--wait", "--run", str(run_dir)]
    job = start(
        ["-m", "mpi4py", PROGRAM, *arguments, *options],
        size=size,
        python=sys.executable,
        environ={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    outcome = finish(job, TIMEOUT_S)
    assert not outcome.timed_out, outcome.output
    return outcome


def said(outcome, beginning):
    """Return what followed these words on a line of their own."""
    assert outcome.returncode == 0, outcome.output
    found = re.search(rf"^{beginning} (.*)$", outcome.output, re.MULTILINE)
    assert found, outcome.output
    return found[1]


@pytest.fixture(params=["zero1", "fsdp2"])
def way(request):
    return [] if request.param == "zero1" else ["--fsdp"]


@pytest.fixture
def killed(way, tmp_path):
    """The run directory of a job of which a rank was killed in its sixth step."""
    directory = tmp_path / "killed"
    outcome = run(SIZE, directory, *way, "--kill-rank", "1", "--kill-step", "6")
    assert outcome.returncode, outcome.output
    return directory


def test_training_that_lost_a_rank_goes_on_to_the_same_bits(way, killed, tmp_path):
    unbroken = run(SIZE, tmp_path / "unbroken", *way)
    copy = shutil.copytree(killed, tmp_path / "copy")

    resumed = run(SIZE, killed, *way)
    on_three = run(3, copy, *way, "--reshard")

    assert said(resumed, "resumed from step") == f"4 on {SIZE} ranks"
    assert said(resumed, "digest") == said(unbroken, "digest")
    assert said(on_three, "resumed from step") == "4 on 3 ranks"
    assert said(on_three, "loaded arrays") == said(resumed, "loaded arrays")
    assert said(on_three, "digest") != said(unbroken, "digest")
