"""What follows from what the ranks of a job found together; pure rules."""

from collections.abc import Iterator

from mpickpt.planning.cost import seconds_said
from mpickpt.planning.findings import Advice, DelayFound, Findings

_MULTIPLE = "MPI_THREAD_MULTIPLE"
_LATE_S = 0.2
_CLOCK_SKEW_S = 1.0
_MANY_HOSTS = 3


def split_launch(findings: Findings) -> Iterator[Advice]:
    """Warn of several jobs of one rank that were meant to be one."""
    split = findings.split
    if split is None:
        return
    yield Advice(
        about="launcher",
        is_grave=True,
        what=f"the launcher started {split.n_processes} processes "
        f"({split.variable}), and MPI makes each a world of 1 rank",
        why="each would save as rank 0, over the others' files; the library refuses",
        remedy="use the mpiexec of the MPI that mpi4py was built with, or srun --mpi "
        "with its PMI (srun --mpi=list shows which there are)",
    )


def no_mpi(findings: Findings) -> Iterator[Advice]:
    """Warn of a launcher without an MPI that Python finds."""
    for failure in findings.failures_of("MPI"):
        yield Advice(
            about="MPI",
            is_grave=True,
            what=f"MPI cannot be used: {failure.text}",
            why="the ranks of a job talk through mpi4py",
            remedy="load the MPI that mpi4py was built with, or build mpi4py anew",
        )


def not_shared(findings: Findings) -> Iterator[Advice]:
    """Warn of nodes that do not see what rank 0 writes."""
    ranks = findings.ranks
    if ranks is None or not ranks.hosts_without:
        return
    yield Advice(
        about="not shared",
        is_grave=True,
        what=f"{_some(ranks.hosts_without)} do not see what {findings.host} writes "
        f"in {findings.directory}",
        why="a checkpoint is one directory that all ranks see; with a disk of each "
        "node's own its parts lie on different machines",
        remedy="save to a parallel file system; use local disks for first copies only",
    )


def differing_mounts(findings: Findings) -> Iterator[Advice]:
    """Say that one directory is mounted in several ways."""
    ranks = findings.ranks
    if ranks is None or not ranks.file_systems or ranks.hosts_without:
        return
    host, seen = ranks.file_systems[0]
    yield Advice(
        about="mounts differ",
        what=f"{host} sees the directory as {seen}, {findings.host} as "
        f"{findings.place.file_system}",
        why="what is measured here may not hold there, and rank 0 decides for all "
        "how shards are written",
        remedy="ask who runs the machine; meanwhile let rank 0 be on such a node",
    )


def never_seen(findings: Findings) -> Iterator[Advice]:
    """Warn of changes that other nodes do not see even when they look again."""
    for delay in findings.ranks.delays if findings.ranks else ():
        if not delay.n_missing:
            continue
        yield Advice(
            about=f"{delay.change} not seen",
            is_grave=True,
            what=f"{delay.change}: {delay.n_missing} of {delay.count} looks from "
            f"another node had not seen it {seconds_said(delay.limit_s)} later, and "
            "not after some more seconds in which the directory was listed",
            why="ranks on other nodes would not find what was saved, and fail",
            remedy="ask for shorter caching of names and attributes in the mount "
            "(NFS: actimeo, lookupcache=positive), or save elsewhere",
        )


def seen_late(findings: Findings) -> Iterator[Advice]:
    """Say which changes other nodes see late."""
    delays = findings.ranks.delays if findings.ranks else ()
    late = [
        f"{delay.change} {_after(delay)}"
        for delay in delays
        if not delay.n_missing and (delay.n_listed or delay.worst_s > _LATE_S)
    ]
    if not late:
        return
    yield Advice(
        about="late changes",
        what=f"other nodes see changes late: {', '.join(late)}",
        why="nodes remember names, sizes and contents for a while; the library lists "
        "directories, looks again and waits, other programs may not",
        remedy="use one run directory for each job; let programs on other nodes ask "
        "mpickpt.latest for the newest checkpoint instead of looking for names",
    )


def _after(delay: DelayFound) -> str:
    if delay.n_listed:
        return "only when the directory is listed"
    return f"after up to {seconds_said(delay.worst_s)}"


def few_threads(findings: Findings) -> Iterator[Advice]:
    """Say that saves go on only when the program polls."""
    ranks = findings.ranks
    if ranks is None or ranks.thread_level == _MULTIPLE:
        return
    yield Advice(
        about="threads",
        what=f"MPI gives {ranks.thread_level}",
        why="a background save cannot be published by a thread of its own then",
        remedy='nothing has to be done: progress="auto" takes "poll", and a save is '
        "published as save_if_due or poll is called",
    )


def odd_clocks(findings: Findings) -> Iterator[Advice]:
    """Warn of clocks of nodes that differ."""
    ranks = findings.ranks
    if ranks is None or ranks.clock_skew_s < _CLOCK_SKEW_S:
        return
    yield Advice(
        about="clocks",
        what=f"clocks of nodes differ by {seconds_said(ranks.clock_skew_s)}",
        why="the library compares no clocks of two nodes, but logs and ages of "
        "checkpoints will mislead you",
        remedy="tell who runs the machine: NTP should hold clocks together",
    )


def _some(hosts: tuple[str, ...]) -> str:
    shown = ", ".join(hosts[:_MANY_HOSTS])
    more = len(hosts) - _MANY_HOSTS
    return f"{shown} and {more} more" if more > 0 else shown


RANK_RULES = (
    split_launch,
    no_mpi,
    not_shared,
    differing_mounts,
    never_seen,
    seen_late,
    few_threads,
    odd_clocks,
)
