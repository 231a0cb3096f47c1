"""The template that stages: program on each node's own disk, checkpoints not."""

from mpickpt import checkpoints
from tests.slurm.jobs import AT_PACE


def test_program_is_copied_to_each_node_and_removed(cluster, submit):
    job = submit("staging")
    job.wait_for(r"^step +1 ")
    disks = [cluster.base / "disk" / node for node in job.nodes()]
    name = f"mpickpt-{job.job_id}"

    are_there = [(disk / name / AT_PACE).is_file() for disk in disks]
    state = job.wait_until_ended()

    assert are_there == [True, True], job.account()
    assert state == "COMPLETED", job.account()
    assert [[*disk.glob(f"{name}*")] for disk in disks] == [[], []]
    assert checkpoints(job.run_dir)[-1].step == 60
