"""When a job is not requeued: it would loop, or do what nobody asked for."""

import pytest

STOPPED = ("bash", "-c", "exit 85", "in place of a launcher")
FAILED = ("bash", "-c", "exit 3", "in place of a launcher")


@pytest.mark.parametrize("name", ["plain", "requeue", "staging"])
def test_job_is_not_requeued_when_it_stops_without_a_checkpoint(submit, name):
    job = submit(name, launcher=STOPPED)

    assert job.wait_until_ended() == "FAILED", job.account()
    assert "no newer checkpoint: not requeued" in job.log
    assert job.shown("Restarts") == "0"


def test_job_is_not_requeued_when_it_stops_without_a_newer_checkpoint(submit):
    saved = submit("plain", pause_s=0)
    saved.wait_until_ended()

    job = submit("plain", launcher=STOPPED)

    assert job.wait_until_ended() == "FAILED", job.account()
    assert "no newer checkpoint: not requeued" in job.log
    assert job.shown("Restarts") == "0"


@pytest.mark.parametrize("name", ["plain", "staging"])
def test_job_is_not_requeued_when_the_program_fails(submit, name):
    job = submit(name, launcher=FAILED)

    assert job.wait_until_ended() == "FAILED", job.account()
    assert "ends with status 3: not requeued" in job.log
    assert job.shown("Restarts") == "0"


def test_job_is_not_requeued_when_cancelled(submit):
    job = submit("requeue")
    job.wait_for(r"^step +15 ")

    job.cancel()

    assert job.wait_until_ended() == "CANCELLED", job.account()
    assert job.shown("Restarts") == "0"
    assert len(job.stopped_after()) == 1, job.account()
