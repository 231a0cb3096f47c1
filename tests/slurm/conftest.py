"""One Slurm for all tests of this folder; jobs end with the test that submits them."""

import re
from collections.abc import Callable, Iterator

import pytest

from tests.mpi_launch import finish, start
from tests.slurm.cluster import Cluster, why_not
from tests.slurm.jobs import EXAMPLE, STEPS, Job, Submitter

REFERENCE_TIMEOUT_S = 120.0


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    slurm = Cluster()
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture(scope="session")
def time_limited(cluster, tmp_path_factory) -> Iterator[tuple[Job, Job]]:
    """Two jobs with a minute each, submitted first, for they take three.

    The first is signalled by Slurm, which does so up to half a minute early; the second
    has only its own clock. Their node is used by no other test.
    """
    submitter = Submitter(cluster, tmp_path_factory.mktemp("time-limit"))
    options = ("--time=1", "--nodelist=n3")
    yield (
        submitter("requeue", "--signal=B:USR1@20", *options, run="a", pause_s=1.0),
        submitter("plain", *options, run="b", pause_s=1.3),
    )
    submitter.end_all()


@pytest.fixture
def submit(cluster, time_limited, tmp_path) -> Iterator[Submitter]:
    submitter = Submitter(cluster, tmp_path)
    yield submitter
    submitter.end_all()


@pytest.fixture
def kill(cluster) -> Iterator[Callable[[str], None]]:
    """Kill a node; it is there again for the next test."""
    killed = []

    def kill(node: str) -> None:
        killed.append(node)
        cluster.kill_node(node)

    yield kill
    for node in killed:
        cluster.revive_node(node)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> str:
    """The digest at the end of a run on 4 ranks that nothing interrupts."""
    run = tmp_path_factory.mktemp("uninterrupted")
    options = ["-m", "mpi4py", EXAMPLE, f"--steps={STEPS}", f"--run={run}"]
    outcome = finish(start(options, size=4), REFERENCE_TIMEOUT_S)
    digest = re.search(r"^digest (\w{64})$", outcome.output, re.M)
    assert digest, outcome.output
    return digest[1]
