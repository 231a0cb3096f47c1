"""Says in words what the ranks of a job found together."""

from mpickpt.doctor.words import NOT_FOUND, Lines, time_said
from mpickpt.planning.cost import rate_said, seconds_said
from mpickpt.planning.findings import DelayFound, Findings, RanksFound

_LOCKS = {True: "hold", False: "do NOT hold; the library needs none", None: NOT_FOUND}
_MOST_HOSTS = 4


def ranks_lines(findings: Findings) -> Lines:
    """Return the lines about what ranks see, none without ranks."""
    ranks = findings.ranks
    if ranks is None:
        return
    yield "ranks", _hosts_said(ranks)
    yield "thread level", ranks.thread_level
    if findings.split is not None:
        yield (
            "launcher",
            (f"{findings.split.variable}={findings.split.n_processes}, yet MPI sees 1"),
        )
    if ranks.total_write_bps is not None and ranks.slowest_write_bps is not None:
        yield (
            "all write at once",
            (
                f"{rate_said(ranks.total_write_bps)}, "
                f"the slowest rank {rate_said(ranks.slowest_write_bps)}"
            ),
        )
    if ranks.n_hosts < 2:
        yield "other nodes", "none: what they see takes ranks on two nodes"
        return
    missing = ", ".join(ranks.hosts_without)
    yield "one directory", f"NOT seen by {missing}" if missing else "seen by all nodes"
    for host, system in ranks.file_systems:
        yield "differs", f"{host}: {system}"
    yield "clocks of nodes", f"differ by {time_said(ranks.clock_skew_s)} at most"
    if not missing:
        yield "locks between nodes", _LOCKS[ranks.locks_between_hosts]
    for delay in ranks.delays:
        yield delay.change, _delay_said(delay)


def _hosts_said(ranks: RanksFound) -> str:
    if ranks.n_hosts == 1:
        return f"{ranks.n_ranks} on {ranks.ranks_per_host[0][0]}"
    counts = [count for _, count in ranks.ranks_per_host]
    least, most = min(counts), max(counts)
    each = f"{most}" if least == most else f"{least} to {most}"
    names = ", ".join(host for host, _ in ranks.ranks_per_host[:_MOST_HOSTS])
    more = ", ..." if ranks.n_hosts > _MOST_HOSTS else ""
    return f"{ranks.n_ranks}, {each} on each of {ranks.n_hosts} nodes: {names}{more}"


def _delay_said(delay: DelayFound) -> str:
    if not delay.count:
        return NOT_FOUND
    if delay.n_missing:
        return f"NOT seen after {seconds_said(delay.limit_s)} and some listing"
    if delay.n_listed:
        return (
            f"seen by {delay.n_listed} of {delay.count} only after "
            f"{seconds_said(delay.limit_s)}, when the directory was listed"
        )
    if not delay.worst_s:
        return f"seen at once by all {delay.count}"
    median, worst = time_said(delay.median_s), time_said(delay.worst_s)
    return f"seen after {median} (worst of {delay.count}: {worst})"
