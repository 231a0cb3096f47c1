"""What an MPI with ULFM tells of ranks that died; nothing where there is none.

User-Level Failure Mitigation (Open MPI 5 under ``mpiexec --with-ft ulfm``): a call
that needs a dead rank fails within milliseconds instead of waiting for the deadline.
Only ranks that talked to the dead one see that, so the first to see it revokes the
library's own duplicates, and a revoked communicator fails every call of every rank.
The user's communicator is never revoked. Imports no mpi4py.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from mpickpt.parallel.waiting import Pace

# Who was told by a revocation can come before the news of who has died.
DEAD_KNOWN_WITHIN_S = 0.5

_DEATHS = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")


def is_death(mpi: Any, error: Exception) -> bool:
    """Tell whether an error of MPI says that a rank has died."""
    return _tells_deaths(mpi) and error.Get_error_class() in {  # type: ignore[attr-defined]
        getattr(mpi, name) for name in _DEATHS
    }


def dead_ranks(mpi: Any, comm: Any) -> list[int]:
    """Return the ranks of a communicator that MPI knows to be dead; local."""
    if not _tells_deaths(mpi):
        return []
    try:
        failed, everyone = comm.Get_failed(), comm.Get_group()
        ranks = failed.Translate_ranks(list(range(failed.Get_size())), everyone)
        failed.Free()
        everyone.Free()
    except (mpi.Exception, NotImplementedError):
        return []
    return sorted(ranks)


def dead_ranks_soon(mpi: Any, comm: Any) -> list[int]:
    """Return the dead ranks, having waited a moment for the news of the first one."""
    end, pace = time.monotonic() + DEAD_KNOWN_WITHIN_S, Pace()
    while not (dead := dead_ranks(mpi, comm)) and time.monotonic() < end:
        # The news comes in while MPI works, which it refuses to on a revoked one.
        with suppress(mpi.Exception):
            mpi.COMM_SELF.Iprobe()
        pace.sleep()
    return dead


def revoke(mpi: Any, comms: Iterable[Any]) -> None:
    """Make every call on these communicators fail, on all of their ranks."""
    for comm in comms:
        with suppress(mpi.Exception, NotImplementedError):
            comm.Revoke()


def words_for(dead: Sequence[int]) -> str:
    """Return the words that say who died."""
    if not dead:
        return "MPI reports that a rank has died"
    ranks = ", ".join(map(str, dead))
    return f"MPI reports that rank{'s' if len(dead) > 1 else ''} {ranks} died"


def _tells_deaths(mpi: Any) -> bool:
    # mpi4py gives both the same value where MPI knows neither, and older ones none.
    failed = getattr(mpi, "ERR_PROC_FAILED", None)
    return failed is not None and failed != getattr(mpi, "ERR_REVOKED", None)
