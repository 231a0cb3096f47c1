"""Jobs that run into a time limit of one minute, and go on."""

import pytest

TIMEOUT_S = 240.0


def stopped_in_time_and_went_on(job, digest):
    assert job.wait_until_ended(TIMEOUT_S) == "COMPLETED", job.account()
    assert int(job.shown("Restarts")) >= 1
    assert job.resumed_from() == job.stopped_after(), job.account()
    assert job.digest() == digest, job.account()


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_job_goes_on_when_slurm_signals_it_before_its_time_is_up(
    time_limited, uninterrupted
):
    job, _ = time_limited

    stopped_in_time_and_went_on(job, uninterrupted)
    assert "got SIGUSR1, telling the ranks" in job.log, job.account()


@pytest.mark.timeout(TIMEOUT_S + 30)
def test_job_goes_on_when_it_sees_by_itself_that_its_time_is_up(
    time_limited, uninterrupted
):
    _, job = time_limited

    stopped_in_time_and_went_on(job, uninterrupted)
    assert "got SIG" not in job.log, job.account()
