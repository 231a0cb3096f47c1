"""What happens to which rank of which save or load, in the cases of the death suite."""

from dataclasses import dataclass
from typing import Any

from tests.faults.errors_calls import Call

SIZE = 4
RANKS = range(SIZE)
TIMEOUT_S = 3.0
# A loaded machine of two cores: three deadlines, and what a roll call takes.
GRACE_S = 3 * TIMEOUT_S + 3.0
# Where MPI tells of deaths no deadline is to be waited for.
ULFM_TIMEOUT_S = 40.0
SLOW_TIMEOUT_S, SLOW_S = 8.0, 2.5

# Of launchers and MPIs: plain ones kill the survivors, the other two let them live.
PLAIN, HYDRA, ULFM, OPEN_MPI = "plain", "hydra", "ulfm", "openmpi"
NO_SURVIVORS = (PLAIN, OPEN_MPI)

LOADS = ("load", "reshard")

# A rank that goes once these have begun may leave others with a save that ended well.
LATE = ("publish", "manifest", "published", "answer", "retention", "unpublish")
LATE_OF_LOAD = ("amid-read", "move", "compare")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What happens to which rank of which save or load.

    Attributes
    ----------
    name : str
        Of the case.
    kind : {"call", "moment", "all", "random", "stop"}
        Killed before a system call; at a moment; all ranks at once, at a moment or at
        any time; or stopped at a moment.
    mode, rank, moment
        The save or load, the rank, and the moment of `death_modes` where there is one.
    launcher : {"plain", "hydra", "ulfm", "openmpi"}
        What starts the ranks, and whether survivors live: MPICH's mpiexec, the same
        with a process between that hides the death, Open MPI's with and without ULFM.
    call : Call or None
        The system call.
    is_published : bool or None
        Whether the new checkpoint must be there in the end; None: it may be.
    after_s : float
        For "random": the seconds until they are killed.
    slow_s : float
        For "stop": after how many seconds the rank goes on by itself; 0: never.
    """

    name: str
    kind: str
    mode: str
    rank: int
    moment: str = ""
    launcher: str = PLAIN
    call: Call | None = None
    is_published: bool | None = None
    after_s: float = 0.0
    slow_s: float = 0.0

    @property
    def timeout_s(self) -> float:
        """The deadline that the job is given."""
        if self.slow_s:
            return SLOW_TIMEOUT_S
        if self.launcher == ULFM:
            return ULFM_TIMEOUT_S
        return (
            60.0 if self.launcher in NO_SURVIVORS and self.kind != "stop" else TIMEOUT_S
        )

    @property
    def survivors(self) -> list[int]:
        """Ranks that must tell what they raised."""
        if self.kind != "stop" and self.launcher in NO_SURVIVORS:
            return []
        return [rank for rank in RANKS if rank != self.rank]

    @property
    def is_late(self) -> bool:
        """Whether survivors may end well."""
        return self.moment in (*LATE, *LATE_OF_LOAD)

    def as_case(self) -> dict[str, Any]:
        """Return it as the MPI programs take it."""
        case = {
            "name": self.name,
            "kind": self.kind,
            "mode": self.mode,
            "rank": self.rank,
            "moment": self.moment,
            "timeout_s": self.timeout_s,
            "after_s": self.after_s,
            "slow_s": self.slow_s,
            "hung_s": self.timeout_s + GRACE_S + 5.0,
        }
        if self.call is not None:
            inject = f"{self.call.call}:signal=SIGKILL:when={self.call.when}"
            case |= {"inject": inject, "paths": [self.call.path], "way": self.call.way}
        return case
