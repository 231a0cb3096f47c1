"""What probes of a file system by one process find, as records; touches nothing.

Times are in seconds, speeds in bytes a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GRANTED = "granted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long some calls of one kind took."""

    count: int
    median_s: float
    worst_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RenamingFound:
    """What others see while a file takes the name of another one.

    Attributes
    ----------
    replaces : bool
        Whether the name stands for the new file afterwards.
    n_opened, n_failed : int
        How often the name was opened meanwhile, and how often that failed.
    n_missed : int
        How often the name then stood for no file.
    keeps_readers : bool
        Whether who had opened the old file could read it to its end.
    timing : Timing
        Of the renames alone.
    """

    replaces: bool
    n_opened: int
    n_failed: int
    n_missed: int
    keeps_readers: bool
    timing: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatingFound:
    """How fast one process makes small files in a directory of its own."""

    n_files: int
    creates_per_s: float
    removes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectIoFound:
    """Whether O_DIRECT is taken, from which alignment on, and else the errno."""

    is_accepted: bool
    alignment_nbytes: int | None = None
    errno: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocksFound:
    """How locks are answered: "granted", or the name of an errno."""

    flock: str
    fcntl: str

    @property
    def are_granted(self) -> bool:
        """Whether both kinds are."""
        return self.flock == GRANTED and self.fcntl == GRANTED


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFound:
    """How fast one process writes, durably, and reads with a page cache dropped."""

    nbytes: int
    write_bps: float
    read_bps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFound:
    """How fast one core digests."""

    sha256_bps: float
    crc32_bps: float
    has_zlib_ng: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What one process tried; None where it did not work.

    Attributes
    ----------
    creates_exclusively : bool or None
        Whether creating a file that exists is refused where that is asked for.
    clock_skew_s : float or None
        By how much the file system's clock is ahead of this node's.
    """

    renaming: RenamingFound | None = None
    directory_sync: Timing | None = None
    sync_1mib: Timing | None = None
    sync_16mib: Timing | None = None
    creating: CreatingFound | None = None
    creates_exclusively: bool | None = None
    direct_io: DirectIoFound | None = None
    locks: LocksFound | None = None
    clock_skew_s: float | None = None
    speed: SpeedFound | None = None


def timing_of(seconds: Sequence[float]) -> Timing:
    """Return count, median and worst of some times, at least one."""
    ordered = sorted(seconds)
    middle = len(ordered) // 2
    median_s = (ordered[middle] + ordered[-1 - middle]) / 2
    return Timing(count=len(ordered), median_s=median_s, worst_s=ordered[-1])
