"""What `mpickpt doctor` finds, as records that advice is derived from; touches nothing.

Times are in seconds, speeds in bytes a second. None stands for what could not be found
out; `Findings.failures` then says why.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mpickpt.planning.file_systems import FileSystem
from mpickpt.planning.probed import ProcessorFound, Tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A probe that failed, or that did not come back.

    Attributes
    ----------
    probe : str
        What was tried: "rename", "sync".
    errno : str or None
        Name of the number that the file system gave: "EIO".
    text : str
        What it said.
    host : str
        Where.
    has_hung : bool
        Whether it did not come back.
    """

    probe: str
    errno: str | None
    text: str
    host: str
    has_hung: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaFound:
    """What a user, group or project may use; None is no limit, or not told."""

    kind: str
    name: str
    source: str
    used_nbytes: int | None
    limit_nbytes: int | None
    used_files: int | None
    limit_files: int | None
    is_binding: bool

    @property
    def left_nbytes(self) -> int | None:
        """Bytes that may still be written."""
        return self._left(self.limit_nbytes, self.used_nbytes)

    @property
    def left_files(self) -> int | None:
        """Files that may still be made."""
        return self._left(self.limit_files, self.used_files)

    def _left(self, limit: int | None, used: int | None) -> int | None:
        if limit is None or used is None or not self.is_binding:
            return None
        return max(0, limit - used)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceFound:
    """What can still be written; `unknown` says what could not be asked for."""

    free_nbytes: int | None
    total_nbytes: int | None
    free_inodes: int | None
    quotas: tuple[QuotaFound, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StripesFound:
    """How Lustre is going to lay out files made in the directory.

    Attributes
    ----------
    layout : str or None
        In words; None where it could not be read.
    n_osts : int or None
        Number of targets that files are spread over.
    fullest_ost : int or None
        Index of the one with the least room.
    fullest_free_nbytes : int or None
        That room.
    complaint : str or None
        Why the layout is bad for one file per rank.
    """

    layout: str | None
    n_osts: int | None = None
    fullest_ost: int | None = None
    fullest_free_nbytes: int | None = None
    complaint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PermissionsFound:
    """Who may read what is made in the directory.

    Attributes
    ----------
    umask : str
        Octal: "022".
    group : str
        Group of the directory.
    has_set_gid : bool
        Whether what is made in the directory belongs to that group.
    complaints : tuple of str
        What others lose by the permissions of new files.
    """

    umask: str
    group: str
    has_set_gid: bool
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsFound:
    """What is installed; None where it is not, or cannot be imported."""

    mpickpt: str
    python: str
    numpy: str | None
    h5py: str | None
    hdf5: str | None
    mpi4py: str | None
    mpi: str | None
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayFound:
    """How late a change that one node has made and told of is seen by others.

    Attributes
    ----------
    change : str
        "new name", "name looked up before", "replaced file", "grown file".
    count : int
        How often it was looked for, by all nodes together.
    median_s, worst_s : float
        What it took of those that came by themselves; 0 where none did.
    n_listed : int
        How many came only when the directory was listed, after `limit_s`.
    n_missing : int
        How many did not come even so, as long as the library looks for them.
    limit_s : float
        How long was looked without listing.
    """

    change: str
    count: int
    median_s: float
    worst_s: float
    n_listed: int
    n_missing: int
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFound:
    """What the ranks of a job find together.

    Attributes
    ----------
    n_ranks : int
        Size of the world.
    ranks_per_host : tuple of (str, int)
        By host, in the order of its first rank.
    thread_level : str
        "MPI_THREAD_MULTIPLE" or less.
    hosts_without : tuple of str
        Those that do not see what rank 0 wrote.
    file_systems : tuple of (str, str)
        Host and what it sees, where that differs from rank 0's; else empty.
    clock_skew_s : float
        By which clocks of hosts differ at most.
    locks_between_hosts : bool or None
        Whether a lock of one host keeps out another one.
    delays : tuple of DelayFound
        Empty on one host.
    total_write_bps, slowest_write_bps : float or None
        Of all ranks writing at once, and of the slowest of them.
    """

    n_ranks: int
    ranks_per_host: tuple[tuple[str, int], ...]
    thread_level: str
    hosts_without: tuple[str, ...] = ()
    file_systems: tuple[tuple[str, str], ...] = ()
    clock_skew_s: float = 0.0
    locks_between_hosts: bool | None = None
    delays: tuple[DelayFound, ...] = ()
    total_write_bps: float | None = None
    slowest_write_bps: float | None = None

    @property
    def n_hosts(self) -> int:
        """Number of hosts."""
        return len(self.ranks_per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFound:
    """A launcher that started several processes, each a world of its own to MPI."""

    variable: str
    n_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFound:
    """What a file system tells of a directory when it is asked."""

    file_system: FileSystem
    mount_options: tuple[str, ...] = ()
    space: SpaceFound | None = None
    stripes: StripesFound | None = None
    permissions: PermissionsFound | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that was found about one directory."""

    directory: str
    host: str
    checkpoint_nbytes: int | None
    place: PlaceFound
    tried: Tried
    processor: ProcessorFound
    versions: VersionsFound
    ranks: RanksFound | None = None
    split: SplitFound | None = None
    failures: tuple[Failure, ...] = ()

    @property
    def n_ranks(self) -> int:
        """Number of ranks that are known of."""
        return 1 if self.ranks is None else self.ranks.n_ranks

    @property
    def n_hosts(self) -> int:
        """Number of hosts that are known of."""
        return 1 if self.ranks is None else self.ranks.n_hosts

    def failures_of(self, *probes: str) -> Iterator[Failure]:
        """Yield the failures of some probes."""
        return (failure for failure in self.failures if failure.probe in probes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a user should know of a place for checkpoints.

    Attributes
    ----------
    about : str
        What it is about, in a word or two; for scripts too.
    is_grave : bool
        Whether checkpoints would fail or be lost.
    what, why, remedy : str
        What is the matter, the reason, and what to do.
    """

    about: str
    is_grave: bool = False
    what: str
    why: str
    remedy: str
