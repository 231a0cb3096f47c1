"""Detects N jobs of one rank that were meant to be one job of N ranks.

Another MPI's mpiexec, or srun without PMI, starts N processes that each believe to
be rank 0 of 1; they would save to the same paths. Touches files only for processes
of that kind: one small claim per process beside the checkpoints.
"""

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpickpt.errors import CheckpointError, StorageError
from mpickpt.parallel.communicators import mpi_of

SIZE_AND_RANK = {
    "PMI_SIZE": "PMI_RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
# The processes of one launch reach their first save within about this time.
LAUNCH_S = 1.0
LAUNCH_NAMES = (
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLaunch:
    """A launch of several processes that MPI does not join into one world.

    Attributes
    ----------
    variable : str
        Environment variable that tells how many processes were launched.
    size : int
        That number.
    rank : int or None
        Which of them this process is, where the launcher tells.
    token : str
        The same in all processes of the launch, as far as their launcher names it.
    """

    variable: str
    size: int
    rank: int | None
    token: str


def check_launcher(comm: Any, directory: Path) -> None:
    """Refuse to share a directory with the other processes of a split launch.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        Communicator of the save or load.
    directory : Path
        Existing directory; claims go to its ``.mpickpt/``.

    Raises
    ------
    CheckpointError
        Other processes of this launch use the directory as their rank 0 too, or the
        launcher does not tell the processes apart.

    Notes
    -----
    Not collective. Only the world communicator is checked: independent runs of one
    rank each, in directories of their own, go through.
    ``MPICKPT_LAUNCHER_CHECK=0`` switches the check off.
    """
    launch = split_launch(comm, os.environ)
    if launch is None:
        return
    if launch.rank is None:
        raise CheckpointError(_refusal(launch, directory, "and does not number them"))
    others = _claim(launch, directory)
    if others:
        sharing = f"and {len(others)} more of them use {directory}"
        raise CheckpointError(_refusal(launch, directory, sharing))


def split_launch(comm: Any, environ: Mapping[str, str]) -> SplitLaunch | None:
    """Return the split launch that this world of one rank belongs to, if it does."""
    if comm is None or environ.get("MPICKPT_LAUNCHER_CHECK") == "0":
        return None
    if comm.Get_size() != 1 or not _is_world(comm):
        return None
    for variable, rank_variable in SIZE_AND_RANK.items():
        size = _number(environ.get(variable))
        if size is not None:
            if size == 1:
                return None
            rank = _number(environ.get(rank_variable))
            token = _launch_token(environ)
            return SplitLaunch(variable=variable, size=size, rank=rank, token=token)
    return None


def _is_world(comm: Any) -> bool:
    mpi = mpi_of(comm)
    return bool(mpi.Comm.Compare(comm, mpi.COMM_WORLD) == mpi.IDENT)


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _launch_token(environ: Mapping[str, str]) -> str:
    names = [environ[name] for name in LAUNCH_NAMES if name in environ]
    # Processes that one launcher started on a host have one parent.
    names = names or [socket.gethostname(), str(os.getppid())]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]


def _claim(launch: SplitLaunch, directory: Path) -> list[Path]:
    control = directory / ".mpickpt"
    own = control / f"launch-{launch.token}-{launch.rank}"
    try:
        control.mkdir(exist_ok=True)
        if not own.exists():
            own.touch()
            time.sleep(LAUNCH_S)
        claims = list(control.glob(f"launch-{launch.token}-*"))
    except OSError as error:
        raise StorageError(
            f"cannot claim {directory} for this process: {error}",
            errno=error.errno,
            path=str(own),
        ) from error
    return [claim for claim in claims if claim != own]


def _refusal(launch: SplitLaunch, directory: Path, sharing: str) -> str:
    return (
        f"{directory}: the launcher started {launch.size} processes "
        f"({launch.variable}) {sharing}, but MPI gives each a world of its own of 1 "
        f"rank: use the mpiexec of the MPI that mpi4py was built with, or srun --mpi "
        f"with its PMI; MPICKPT_LAUNCHER_CHECK=0 switches this check off"
    )
