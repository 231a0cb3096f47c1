"""A job that is cancelled while it saves, and two jobs that want one run directory."""

from mpickpt import checkpoints, latest, read_manifest, step_path
from mpickpt.storage.verification import verify_checkpoint
from tests.slurm.cluster import wait_until


def test_resubmitted_job_resumes_when_cancelled_in_mid_save(submit, uninterrupted):
    cancelled = submit("requeue", hanging_step=20)
    directory = step_path(cancelled.run_dir, 20)
    cancelled.wait_for(r"^step +20 ")
    wait_until(lambda: [*directory.glob("rank00002-*.tmp")], "rank 2 writes", 20)

    cancelled.cancel()
    assert cancelled.wait_until_ended() == "CANCELLED", cancelled.account()
    newest = latest(cancelled.run_dir)
    again = submit("requeue")

    assert newest == step_path(cancelled.run_dir, 10)
    assert again.wait_until_ended() == "COMPLETED", again.account()
    assert again.resumed_from() == [10], again.account()
    assert again.digest() == uninterrupted, again.account()
    saved = [verify_checkpoint(entry.path) for entry in checkpoints(again.run_dir)]
    assert [report.manifest.step for report in saved] == [10, 20, 30, 40, 50, 60]
    assert all(report.is_whole and not report.rubbish for report in saved)


def test_second_job_on_the_same_run_directory_is_refused(submit):
    first = submit("plain", pause_s=1.0)
    first.wait_for(r"^step +10 ")

    second = submit("requeue", pause_s=0)

    assert second.wait_until_ended() == "FAILED", second.account()
    assert "LeaseHeldError: " in second.log, second.account()
    assert f"job slurm-mpickpt-tests-{first.job_id} " in second.log
    assert second.shown("Restarts") == "0"
    assert first.state == "RUNNING", first.account()
    saved = [read_manifest(entry.path) for entry in checkpoints(first.run_dir)]
    assert [each.step for each in saved] == [*range(10, saved[-1].step + 1, 10)]
    assert {each.run["job_id"] for each in saved} == {first.job_id}
