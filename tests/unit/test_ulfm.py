"""What is asked of an MPI that can tell of dead ranks, and of one that cannot."""

from types import SimpleNamespace

import pytest

from mpickpt.parallel.ulfm import dead_ranks, dead_ranks_soon, is_death, revoke


class MPIError(Exception):
    def __init__(self, error_class):
        self.error_class = error_class

    def Get_error_class(self):
        return self.error_class


class Group:
    def __init__(self, ranks):
        self.ranks = ranks

    def Get_size(self):
        return len(self.ranks)

    def Translate_ranks(self, ranks, other):
        return [other.ranks.index(self.ranks[rank]) for rank in ranks]

    def Free(self):
        pass


class Comm:
    """Of the processes 10 to 13, of which some are dead."""

    def __init__(self, *dead, news_at=0):
        self.dead = dead
        self.news_at = news_at
        self.n_asked = 0
        self.revoked = False

    def Get_failed(self):
        self.n_asked += 1
        return Group(self.dead if self.n_asked > self.news_at else ())

    def Get_group(self):
        return Group([10, 11, 12, 13])

    def Revoke(self):
        self.revoked = True


WITH_ULFM = SimpleNamespace(
    Exception=MPIError,
    ERR_PROC_FAILED=75,
    ERR_PROC_FAILED_PENDING=76,
    ERR_REVOKED=77,
    COMM_SELF=SimpleNamespace(Iprobe=lambda: False),
)
# mpi4py with an MPI that knows neither; and an older mpi4py.
WITHOUT = [
    SimpleNamespace(
        Exception=MPIError,
        ERR_PROC_FAILED=13,
        ERR_PROC_FAILED_PENDING=13,
        ERR_REVOKED=13,
    ),
    SimpleNamespace(Exception=MPIError),
]


@pytest.mark.parametrize("error_class", [75, 76, 77])
def test_errors_of_ulfm_are_deaths(error_class):
    assert is_death(WITH_ULFM, MPIError(error_class))


def test_other_errors_are_no_deaths():
    assert not is_death(WITH_ULFM, MPIError(13))


@pytest.mark.parametrize("mpi", WITHOUT)
def test_nobody_is_dead_where_mpi_cannot_tell(mpi):
    assert not is_death(mpi, MPIError(13))
    assert dead_ranks(mpi, Comm(11)) == []


def test_dead_ranks_are_those_of_the_communicator():
    assert dead_ranks(WITH_ULFM, Comm(13, 11)) == [1, 3]


def test_news_of_the_dead_is_waited_for():
    assert dead_ranks_soon(WITH_ULFM, Comm(12, news_at=5)) == [2]


def test_revoking_goes_on_after_one_that_cannot():
    class Unable(Comm):
        def Revoke(self):
            raise NotImplementedError

    comms = [Unable(), Comm()]

    revoke(WITH_ULFM, comms)

    assert comms[1].revoked
