"""Checkpoints on the disks of the nodes: one of them is lost, and its disk with it."""

import re
import shutil

import pytest

from mpickpt import checkpoints
from mpickpt.format.naming import step_directory_name
from tests.slurm.cluster import LOCAL_DISK

# A third node takes the place of the lost one; the fourth has other jobs.
OPTIONS = (
    *("--nodes=2", "--ntasks-per-node=2", "--exclude=n3"),
    "--export=ALL,MPICKPT_LOG=info",
)


@pytest.fixture
def lose(cluster, kill):
    """Let a node fail and Slurm know it; what its disk holds of runs is gone."""

    def lose(node):
        kill(node)
        shutil.rmtree(cluster.base / "disk" / node / node)
        cluster.notice_dead(node)

    return lose


@pytest.fixture
def submit_in_tiers(submit, tmp_path):
    def submit_in_tiers(*, copies=0, every=1, slow=0, node="{node}", **options):
        tiers = [LOCAL_DISK / node / tmp_path.name, copies, every, slow]
        options |= {"tiers": list(map(str, tiers)), "pause_s": 0.1}
        return submit("requeue", *OPTIONS, **options)

    return submit_in_tiers


def sources_of(job):
    """Return the steps that the job has restored, and where from, in words."""
    pattern = r" mpickpt\S*: restored step (\d+): (.*)$"
    return re.findall(pattern, job.log, re.M)


def test_job_goes_on_from_partner_copies_when_a_node_is_lost(
    submit_in_tiers, lose, uninterrupted
):
    job = submit_in_tiers(copies=1, every=4)
    job.wait_for(r"^step +25 ")
    lost, left = job.nodes()

    lose(lost)

    assert job.wait_until_ended() == "COMPLETED", job.account()
    assert left in job.nodes() and lost not in job.nodes(), job.account()
    [(step, source)] = sources_of(job)
    assert job.resumed_from() == [int(step)], job.account()
    assert int(step) in (10, 20, 30), "a step of which nothing left the nodes"
    assert str(job.run_dir) not in source, job.account()
    assert job.digest() == uninterrupted, job.account()
    assert [entry.step for entry in checkpoints(job.run_dir)] == [40]


def test_job_goes_on_from_the_shared_tier_when_a_node_is_lost_without_copies(
    submit_in_tiers, lose, uninterrupted
):
    job = submit_in_tiers(copies=0)
    job.wait_for(r"step 20 has come to ")
    left, lost = job.nodes()

    lose(lost)

    assert job.wait_until_ended() == "COMPLETED", job.account()
    assert left in job.nodes() and lost not in job.nodes(), job.account()
    [(step, source)] = sources_of(job)
    assert job.resumed_from() == [int(step)], job.account()
    assert int(step) in (20, 30), job.account()
    assert f"2 from {job.run_dir}" in source, job.account()
    assert job.digest() == uninterrupted, job.account()
    assert checkpoints(job.run_dir)[-1].step == 60


def test_script_flushes_what_the_program_had_no_time_to_copy(
    cluster, submit_in_tiers, tmp_path, uninterrupted
):
    job = submit_in_tiers(slow=100, node=".", flushes=True)
    job.wait_for(r"^step +15 ")
    disks = [cluster.base / "disk" / node for node in job.nodes()]

    job.signal("USR1")
    job.wait_for("requeued, to go on from ")
    for disk in disks:
        shutil.rmtree(disk / tmp_path.name)

    assert job.wait_until_ended() == "COMPLETED", job.account()
    [stopped] = job.stopped_after()
    flushed = job.run_dir / step_directory_name(stopped)
    assert "are left: leaving them to mpickpt flush" in job.log, job.account()
    assert job.log.count(f"step {stopped} has not come to ") == 1, job.account()
    assert f"{flushed}: published, " in job.log, job.account()
    assert f"requeued, to go on from {flushed}\n" in job.log, job.account()
    assert sources_of(job) == [(str(stopped), f"4 shards from {flushed}")]
    assert job.digest() == uninterrupted, job.account()
