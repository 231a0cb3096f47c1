"""Tells of the MPI below mpi4py, and whether this process is one of a job."""

import os
import sys
from collections.abc import Mapping

from mpickpt.parallel.launcher import SIZE_AND_RANK
from mpickpt.storage.site_command import run_site_command

# What launchers set in each process that they start: MPICH and its kin, PMIx, Cray,
# Flux, Intel. Slurm's SLURM_PROCID is set in a batch script too.
_OF_LAUNCHERS = (
    *SIZE_AND_RANK,
    "PMI_RANK",
    "PMIX_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "MPI_LOCALNRANKS",
)
_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_TIMEOUT_S = 10.0
# MPI is not started: that ends programs on some login nodes.
_ASK_NAME = (
    "import mpi4py; mpi4py.rc.initialize = False; "
    "from mpickpt.parallel.world import mpi_name; print(mpi_name())"
)


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a launcher of MPI programs has started this process."""
    return "mpi4py.MPI" in sys.modules or any(name in environ for name in _OF_LAUNCHERS)


def launched_processes(environ: Mapping[str, str] = os.environ) -> tuple[str, int, int]:
    """Return what a launcher says: variable, number of processes, number of this one.

    The variable is "", and it is one process, where no launcher says more.
    """
    for variable, rank_variable in SIZE_AND_RANK.items():
        size, rank = environ.get(variable, ""), environ.get(rank_variable, "0")
        if size.isdecimal():
            return variable, int(size), int(rank) if rank.isdecimal() else 0
    return "", 1, 0


def thread_level() -> str:
    """Return the thread level that MPI gives: "MPI_THREAD_MULTIPLE" or less."""
    from mpi4py import MPI

    found = MPI.Query_thread()
    for level in _LEVELS:
        if getattr(MPI, f"THREAD_{level}") == found:
            return f"MPI_THREAD_{level}"
    return f"thread level {found}"


def mpi_name_in_other_process() -> str | None:
    """Return what the MPI library calls itself, None if it cannot be loaded."""
    command = [sys.executable or "python3", "-c", _ASK_NAME]
    answer = run_site_command(command, _TIMEOUT_S)
    return answer.strip() or None if answer else None
