"""One pytest session over all ranks of the world.

Rank 0 alone reports; a failure on any rank fails the test on all; a rank that does
not reach the end of a test ends the run, and so does a test that hangs everywhere.
"""

import faulthandler
import os
import sys
import time

import pytest

PEER_TIMEOUT_S = float(os.environ.get("MPICKPT_TEST_PEER_TIMEOUT_S", "20"))
TEST_TIMEOUT_S = float(os.environ.get("MPICKPT_TEST_TIMEOUT_S", "120"))
HANG_EXIT_CODE = 86


def pytest_ignore_collect(collection_path, config):
    """Leave this folder to the sessions that tests/test_parallel_suite.py starts."""
    return None if config.getoption("--with-mpi", False) else True


class _World:
    """Control traffic of the test session, on a communicator of its own."""

    def __init__(self):
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        # A copy of stderr gets past pytest's capture.
        self.stderr = os.fdopen(os.dup(2), "w", buffering=1)

    def meet(self, where, outcome):
        """Barrier that sleeps and has a deadline; the run ends when it passes."""
        request, end = self.comm.Ibarrier(), time.monotonic() + PEER_TIMEOUT_S
        while not request.Test():
            if time.monotonic() > end:
                self.stderr.write(
                    f"\n[rank {self.rank}] other ranks did not reach the end of "
                    f"{where} within {PEER_TIMEOUT_S:g} s; here: {outcome}\n"
                    "1 failed (hang)\n"
                )
                self.comm.Abort(HANG_EXIT_CODE)
            time.sleep(0.001)


_worlds = []


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if not config.getoption("--with-mpi", False):
        return
    world = _World()
    _worlds.append(world)
    if world.rank == 0:
        world.stderr.write(f"mpi world size: {world.size}\n")
    else:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        config.option.xmlpath = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if _worlds:
        faulthandler.dump_traceback_later(
            TEST_TIMEOUT_S, exit=True, file=_worlds[0].stderr
        )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if not _worlds:
        return report
    world = _worlds[0]
    own = (report.outcome, report.longreprtext if report.failed else "")
    world.meet(f"{item.nodeid} [{report.when}]", "\n".join(own))
    outcomes = world.comm.allgather(own)
    if len({outcome for outcome, _ in outcomes}) > 1 or report.failed:
        report.outcome = "failed"
        report.longrepr = "\n".join(
            f"--- rank {rank}: {outcome} ---\n{text}"
            for rank, (outcome, text) in enumerate(outcomes)
            if outcome != "passed"
        )
    return report


def pytest_sessionfinish(session, exitstatus):
    if _worlds:
        _worlds[0].meet("the session", str(exitstatus))
    sys.stdout.flush()


@pytest.fixture
def comm():
    """The world communicator."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def shared_tmp_path(comm, tmp_path):
    """One directory for all ranks: rank 0's."""
    from pathlib import Path

    return Path(comm.bcast(str(tmp_path), root=0))
