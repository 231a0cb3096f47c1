"""Finds the ranks that this program was started with, for commands that measure."""

from typing import Any


def world() -> Any:
    """Return the world communicator.

    Raises
    ------
    ImportError
        There is no mpi4py, or no MPI that it works with.

    Notes
    -----
    Initialises MPI. The library itself never calls this: it talks on what it is given.
    """
    from mpi4py import MPI

    return MPI.COMM_WORLD


def mpi_name() -> str:
    """Return what the MPI library calls itself, in a few words."""
    from mpi4py import MPI

    lines: list[str] = MPI.Get_library_version().strip("\0").splitlines()
    return lines[0].partition(",")[0].strip()
