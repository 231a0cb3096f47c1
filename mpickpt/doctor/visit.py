"""What is looked at, and how thoroughly."""

from dataclasses import dataclass
from pathlib import Path

from mpickpt.doctor.asking import Asking
from mpickpt.storage.latency import Often

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is tried.

    Attributes
    ----------
    often : Often
        How often what is timed is done.
    n_files : int
        How many small files are made.
    speed_nbytes : int
        Bytes to write and read at most, by each process.
    speed_s : float
        How long that should take.
    rounds : int
        How often a change is looked for on other nodes.
    limit_s : float
        How long to look for it.
    """

    often: Often
    n_files: int
    speed_nbytes: int
    speed_s: float
    rounds: int
    limit_s: float


THOROUGH = Effort(
    often=Often(20, 1.5),
    n_files=300,
    speed_nbytes=256 * _MIB,
    speed_s=2.0,
    rounds=6,
    limit_s=4.0,
)
QUICK = Effort(
    often=Often(5, 0.15),
    n_files=100,
    speed_nbytes=32 * _MIB,
    speed_s=0.25,
    rounds=2,
    limit_s=1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One look at a directory, as one process has it.

    Attributes
    ----------
    directory : Path
        For checkpoints.
    work : Path
        Empty, in that directory; whoever made it removes it.
    asking : Asking
        Notes what does not work for this process.
    effort : Effort
        How much to try.
    checkpoint_nbytes : int or None
        Size of a checkpoint, if the user has said so.
    n_ranks : int or None
        How many ranks there are; None without MPI.
    """

    directory: Path
    work: Path
    asking: Asking
    effort: Effort
    checkpoint_nbytes: int | None
    n_ranks: int | None
