"""A node of a job fails, and the job goes on without it."""

from tests.slurm.jobs import MPIEXEC


def test_slurm_requeues_the_job_when_it_sees_a_node_dead(
    cluster, kill, submit, uninterrupted
):
    job = submit("staging")
    job.wait_for(r"^step +25 ")
    _, lost = job.nodes()

    kill(lost)
    cluster.notice_dead(lost)

    assert job.wait_until_ended() == "COMPLETED", job.account()
    assert lost not in job.nodes()
    assert job.resumed_from()[0] in (10, 20, 30), job.account()
    assert job.digest() == uninterrupted, job.account()


def test_script_requeues_the_job_when_a_node_died_that_slurm_thinks_alive(
    cluster, kill, submit, uninterrupted
):
    job = submit("staging", "--export=ALL,NODE_TIMEOUT_S=10", launcher=MPIEXEC)
    job.wait_for(r"^step +25 ")
    _, lost = job.nodes()

    kill(lost)
    job.wait_for(r"lost a node .*: requeued")
    cluster.notice_dead(lost)

    assert job.wait_until_ended() == "COMPLETED", job.account()
    assert lost not in job.nodes()
    assert job.resumed_from()[0] in (10, 20, 30), job.account()
    assert job.digest() == uninterrupted, job.account()
