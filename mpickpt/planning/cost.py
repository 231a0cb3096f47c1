"""What checkpoints of a job cost: time, time lost, space; pure functions of speeds.

Every figure comes from a formula that is kept beside it with its numbers put in, so
that a reader can check it by hand.
"""

import math
from dataclasses import dataclass, replace

from mpickpt.planning.interval import YoungDaly

# TCP payload of 1 Gbit/s Ethernet: 1448 of the 1538 bytes that a frame takes on the
# wire (IEEE 802.3: preamble 8, header 14, 1500, check 4, gap 12; RFC 7323 options).
GIGABIT_LINK_BPS = 125e6 * 1448 / 1538
# One client's durable stream to a shared file system over that link, which carries the
# protocol too: what 4 hours for 1 TB through one rank amount to. An assumption.
ONE_STREAM_BPS = 70e6
# Copy in memory by one core, half of what was measured here (14 GB/s).
MEMORY_BPS = 7e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job and the speeds that bound its checkpoints.

    Attributes
    ----------
    nbytes : int
        State of all ranks together, each element once.
    ranks : int
        Number of ranks; each holds an even share.
    mtbf_s : float
        Mean time between failures of the whole job, M.
    link_bps : float
        Bytes a second that arrive at rank 0 from the others.
    rank_bps : float
        Bytes a second that one rank writes durably.
    fs_bps : float
        Bytes a second of the file system, for all ranks together; may be infinite.
    memory_bps : float
        Bytes a second at which one rank copies its state, for asynchronous saves.
    keep : int
        Checkpoints that stay.
    """

    nbytes: int
    ranks: int
    mtbf_s: float
    link_bps: float = GIGABIT_LINK_BPS
    rank_bps: float = ONE_STREAM_BPS
    fs_bps: float = math.inf
    memory_bps: float = MEMORY_BPS
    keep: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What one way to save costs.

    Attributes
    ----------
    name : str
        Of the way.
    save_s : float
        From the call until the checkpoint is durable.
    blocking_s : float
        How long the program waits, C.
    interval_s : float
        Time to compute between two saves.
    load_s : float
        Time to read the checkpoint after a failure.
    lost_s : float
        Mean time that a failure costs.
    overhead : float
        Part of the wall time that is not progress, from 0 to 1.
    formulas : tuple of (str, str)
        Names, and formulas with numbers put in.
    """

    name: str
    save_s: float
    blocking_s: float
    interval_s: float
    load_s: float
    lost_s: float
    overhead: float
    formulas: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What the checkpoints of a job cost, each way."""

    gather_in_turn: Way
    gather: Way
    shards: Way
    shards_async: Way
    space_nbytes: int
    staging_nbytes: int
    ranks_that_fill_fs: float

    @property
    def ratio(self) -> float:
        """How many times longer gathering takes, receiving while it writes."""
        return self.gather.save_s / self.shards.save_s


def cost_of(job: Job) -> Cost:
    """Return what the checkpoints of a job cost.

    Notes
    -----
    With N bytes, P ranks and the speeds of the job:

    - gather, receiving and writing in turn: N (1 - 1/P) / link + N / w0, where one
      rank writes at w0 = min(rank, fs);
    - gather, receiving while it writes: max of the two;
    - shards: N / min(P rank, fs);
    - shards in the background: the program waits N / P / memory.
    """
    gather_s = gather_seconds(job, overlapped=True)
    in_turn_s = gather_seconds(job, overlapped=False)
    shards_s = shards_seconds(job)
    stage_s = job.nbytes / job.ranks / job.memory_bps
    n, p = f"{_b(job.nbytes)}", job.ranks
    writes = _bps(min(job.rank_bps, job.fs_bps))
    receive = f"{n} x (1 - 1/{p}) / {_bps(job.link_bps)}"
    together = _bps(min(job.ranks * job.rank_bps, job.fs_bps))
    return Cost(
        gather_in_turn=_way(
            "gather, then write",
            job,
            save_s=in_turn_s,
            formula=f"{receive} + {n} / {writes} = {_s(in_turn_s)}",
        ),
        gather=_way(
            "gather while writing",
            job,
            save_s=gather_s,
            formula=f"max({receive}, {n} / {writes}) = {_s(gather_s)}",
        ),
        shards=_way(
            "shards",
            job,
            save_s=shards_s,
            formula=f"{n} / min({p} x {_bps(job.rank_bps)}, {_bps(job.fs_bps)}) = "
            f"{n} / {together} = {_s(shards_s)}",
        ),
        shards_async=_way(
            "shards, asynchronous",
            job,
            save_s=stage_s + shards_s,
            blocking_s=stage_s,
            formula=f"{n} / {p} / {_bps(job.memory_bps)} = {_s(stage_s)} of waiting, "
            f"then {_s(shards_s)} in the background",
        ),
        space_nbytes=(job.keep + 1) * job.nbytes,
        staging_nbytes=-(-job.nbytes // job.ranks),
        ranks_that_fill_fs=job.fs_bps / job.rank_bps,
    )


def gather_seconds(job: Job, *, overlapped: bool) -> float:
    """Return the time to gather the state at rank 0 and write it there."""
    receive_s = job.nbytes * (1 - 1 / job.ranks) / job.link_bps
    write_s = job.nbytes / min(job.rank_bps, job.fs_bps)
    return max(receive_s, write_s) if overlapped else receive_s + write_s


def shards_seconds(job: Job) -> float:
    """Return the time in which every rank writes its shard."""
    return job.nbytes / min(job.ranks * job.rank_bps, job.fs_bps)


def overhead_of(
    *, interval_s: float, blocking_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Return the part of the wall time that is not progress, from 0 to 1.

    Notes
    -----
    Daly's complete model (Future Generation Computer Systems 22, 2006, p. 303): with
    failures that come at random, an interval τ of work takes
    ``M exp(R/M) (exp((τ + C)/M) - 1)`` of wall time on average.
    """
    try:
        wall_s = (
            mtbf_s
            * math.exp(restart_s / mtbf_s)
            * math.expm1((interval_s + blocking_s) / mtbf_s)
        )
    except OverflowError:
        return 1.0
    return 1 - interval_s / wall_s


def _way(
    name: str, job: Job, *, save_s: float, formula: str, blocking_s: float | None = None
) -> Way:
    """Return the cost of a way to save; of loading it is assumed to be as fast."""
    waits_s = save_s if blocking_s is None else blocking_s
    behind_s = save_s - waits_s
    best_s = YoungDaly(job.mtbf_s / 3600).interval_s(waits_s)
    # The next save waits for the one in flight.
    interval_s = max(best_s, behind_s)
    load_s = save_s - (0.0 if blocking_s is None else blocking_s)
    # What was not yet published when the failure came is lost as well.
    lost_s = (interval_s + waits_s) / 2 + behind_s + load_s
    overhead = overhead_of(
        interval_s=interval_s,
        blocking_s=waits_s,
        restart_s=load_s + behind_s,
        mtbf_s=job.mtbf_s,
    )
    c, m, x = _s(waits_s), _s(job.mtbf_s), waits_s / (2 * job.mtbf_s)
    if best_s < behind_s:
        interval = f"the save before has to be over: {_s(interval_s)}"
    elif x >= 1:
        interval = f"C = {c} is 2 M or more, so M = {m}"
    else:
        root = math.sqrt(x)
        interval = (
            f"sqrt(2 x {c} x {m}) x (1 + {root:.3g}/3 + {root:.3g}^2/9) - {c} = "
            f"{_s(interval_s)}"
        )
    lost = f"({_s(interval_s)} + {c}) / 2 + {_s(behind_s + load_s)} = {_s(lost_s)}"
    formulas = (
        ("save", formula),
        ("interval", interval),
        ("lost per failure", lost),
        (
            "overhead",
            f"1 - {_s(interval_s)} / ({m} x exp({_s(load_s + behind_s)} / {m}) x "
            f"(exp(({_s(interval_s)} + {c}) / {m}) - 1)) = {overhead:.2%}",
        ),
    )
    return Way(
        name=name,
        save_s=save_s,
        blocking_s=waits_s,
        interval_s=interval_s,
        load_s=load_s,
        lost_s=lost_s,
        overhead=overhead,
        formulas=formulas,
    )


def advice(job: Job, cost: Cost) -> list[str]:
    """Return what to do about the costs, most useful first."""
    said = []
    if job.ranks > cost.ranks_that_fill_fs:
        said.append(
            f"{math.ceil(cost.ranks_that_fill_fs)} ranks already write as fast as the "
            "file system takes it: more do not shorten a save, a faster file system or "
            "a node-local tier does"
        )
    else:
        double = cost_of(replace(job, ranks=2 * job.ranks)).shards.save_s
        said.append(
            f"each rank's own speed is the limit: {2 * job.ranks} ranks would save in "
            f"{_s(double)}"
        )
    if cost.gather.overhead > 0.5:
        said.append("gathering leaves less than half of the time for progress")
    if cost.shards.overhead > 1.25 * cost.shards_async.overhead:
        said.append(
            f"save asynchronously: {cost.shards_async.overhead:.2%} instead of "
            f"{cost.shards.overhead:.2%} overhead, for {_b(cost.staging_nbytes)} of "
            "memory on each rank"
        )
    return said


def nbytes_said(nbytes: float) -> str:
    """Return a number of bytes in decimal units: "980 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} PB"


def rate_said(bps: float) -> str:
    """Return a speed in decimal units: "70 MB/s"."""
    return "no limit" if math.isinf(bps) else f"{nbytes_said(bps)}/s"


def seconds_said(seconds: float) -> str:
    """Return a time as a person says it: "3.7 min"."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


_b, _bps, _s = nbytes_said, rate_said, seconds_said
