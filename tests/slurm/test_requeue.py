"""Each template on a real Slurm: told to stop, saved, requeued, resumed, the same."""

import pytest

from tests.slurm.jobs import MPIEXEC, SRUN

CASES = [
    ("plain", SRUN),
    ("plain", MPIEXEC),
    ("requeue", SRUN),
    ("staging", SRUN),
    ("staging", MPIEXEC),
]


def name_of(launcher):
    return launcher[0] if isinstance(launcher, tuple) else None


@pytest.mark.parametrize(("name", "launcher"), CASES, ids=name_of)
def test_template_resumes_to_the_same_bits_when_signalled(
    submit, uninterrupted, name, launcher
):
    job = submit(name, launcher=launcher)
    job.wait_for(r"^step +15 ")

    job.signal("USR1")

    assert job.wait_until_ended() == "COMPLETED", job.account()
    assert job.shown("Restarts") == "1"
    assert len(job.stopped_after()) == 1, job.account()
    assert job.resumed_from() == job.stopped_after(), job.account()
    assert job.digest() == uninterrupted, job.account()
