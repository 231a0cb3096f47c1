"""What all ranks of a job find out together about a directory."""

import os
import platform
import secrets
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

from mpickpt.bench.ranks import Ranks
from mpickpt.doctor.alone import speed_nbytes
from mpickpt.doctor.visibility import Watch, measure_delays
from mpickpt.doctor.visit import Visit
from mpickpt.parallel.mpi_facts import thread_level
from mpickpt.planning.findings import RanksFound
from mpickpt.planning.probed import Timing
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.probes import hold_lock, is_locked
from mpickpt.storage.shared_mark import (
    MarkSearch,
    Witness,
    make_mark,
    own_view,
    witness,
)
from mpickpt.storage.speed import measured_write_bps

_N_CLOCK_LOOKS = 5
_LOCK_NAME = "locked by rank 0"
_LEAST_NBYTES = 8 << 20
# Of all ranks together, so that a large job does not fill what it looks at.
_MOST_NBYTES = 16 << 30


def examine_together(ranks: Ranks, visit: Visit, synced: Timing | None) -> RanksFound:
    """Return what the ranks of a job find out about one directory together.

    Parameters
    ----------
    ranks : Ranks
        All of the job.
    visit : Visit
        Where, and how thoroughly.
    synced : Timing or None
        What syncing 16 MiB took rank 0.

    Notes
    -----
    Collective.
    """
    hosts = ranks.all_of(platform.node())
    leaders = tuple(_first_ranks(hosts).values())
    sees = _who_sees(ranks, visit)
    without = [host for host, seen in zip(hosts, sees, strict=True) if not seen]
    found = RanksFound(
        n_ranks=ranks.size,
        ranks_per_host=tuple(Counter(hosts).items()),
        thread_level=thread_level(),
        hosts_without=tuple(dict.fromkeys(without)),
        file_systems=_other_file_systems(ranks, visit, hosts, leaders),
        clock_skew_s=_clock_skew_s(ranks, leaders),
    )
    if without:
        return found
    locks = _locks_between_hosts(ranks, visit, leaders)
    delays = measure_delays(Watch(ranks=ranks, leaders=leaders, visit=visit))
    total, slowest = _write_bps(ranks, visit, hosts, synced)
    return replace(
        found,
        locks_between_hosts=locks,
        delays=delays,
        total_write_bps=total,
        slowest_write_bps=slowest,
    )


def _first_ranks(values: Sequence[Hashable]) -> dict[Hashable, int]:
    """Return the first rank of each value, in the order of these ranks."""
    first: dict[Hashable, int] = {}
    for rank, value in enumerate(values):
        first.setdefault(value, rank)
    return first


def _who_sees(ranks: Ranks, visit: Visit) -> list[bool]:
    """Return for each rank whether it finds a mark that rank 0 makes."""
    asking = visit.asking
    view = own_view()
    views = ranks.all_of(view)
    first = _first_ranks(views)

    def mark() -> tuple[str, bool, Witness]:
        name = secrets.token_hex(16)
        is_made = asking.ask("create", lambda: _has_made(visit.work, name)) is True
        return name, is_made, witness(visit.directory, 0, platform.node())

    name, is_made, maker = ranks.from_root(mark)
    sees = True
    # Of ranks that see the same files for sure, one looks.
    if is_made and ranks.rank and ranks.rank == first[view]:

        def look() -> bool:
            own = witness(visit.directory, ranks.rank, platform.node())
            MarkSearch(visit.work, name, maker=maker, own=own).find()
            return True

        sees = asking.ask("shared", look) is True
    found = ranks.all_of(sees)
    return [found[first[view]] for view in views]


def _has_made(work: Path, name: str) -> bool:
    make_mark(work, name)
    return True


def _other_file_systems(
    ranks: Ranks, visit: Visit, hosts: Sequence[str], leaders: Sequence[int]
) -> tuple[tuple[str, str], ...]:
    """Return (host, file system) of those that differ from what rank 0 sees."""
    seen = None
    if ranks.rank in leaders:
        seen = visit.asking.ask("file system", lambda: file_system_of(visit.directory))
    found = ranks.all_of(seen)
    root = found[0]
    return tuple(
        (hosts[rank], f"{other}, from {other.source}")
        for rank in leaders
        if (other := found[rank]) is not None
        and root is not None
        and (other.type, other.source) != (root.type, root.source)
    )


def _clock_skew_s(ranks: Ranks, leaders: Sequence[int]) -> float:
    """Return by how much clocks of hosts differ, beyond how late a barrier ends."""
    looks: list[float] = []
    for _ in range(_N_CLOCK_LOOKS if len(leaders) > 1 else 0):
        ranks.barrier()
        times = ranks.all_of(time.time())
        of_hosts = [times[rank] for rank in leaders]
        looks.append(max(of_hosts) - min(of_hosts))
    return min(looks, default=0.0)


def _locks_between_hosts(
    ranks: Ranks, visit: Visit, leaders: Sequence[int]
) -> bool | None:
    """Return whether what rank 0 has locked is locked for other hosts."""
    if len(leaders) < 2:
        return None
    path, probe = visit.work / _LOCK_NAME, "locks between hosts"
    descriptor = None
    if ranks.rank == 0:
        descriptor = visit.asking.ask(probe, lambda: hold_lock(path))
    if not ranks.all_of(descriptor is not None)[0]:
        return None
    locked = None
    if ranks.rank and ranks.rank in leaders:
        locked = visit.asking.ask(probe, lambda: is_locked(path))
    answers = [answer for answer in ranks.all_of(locked) if answer is not None]
    if descriptor is not None:
        os.close(descriptor)
    return all(answers) if answers else None


def _write_bps(
    ranks: Ranks, visit: Visit, hosts: Sequence[str], synced: Timing | None
) -> tuple[float | None, float | None]:
    """Return at which speed all ranks write at once, and the slowest of them."""
    # Nodes add to each other's speed, ranks of a node share it.
    n_sharing = Counter(hosts)[hosts[0]]

    def share() -> int:
        asked = visit.asking.ask("write", lambda: speed_nbytes(visit, synced))
        nbytes = (asked or 0) // n_sharing
        return max(_LEAST_NBYTES, min(nbytes, _MOST_NBYTES // ranks.size))

    nbytes = ranks.from_root(share)
    ranks.barrier()
    bps = visit.asking.ask("write", lambda: measured_write_bps(visit.work, nbytes))
    speeds = [speed for speed in ranks.all_of(bps) if speed is not None]
    if len(speeds) < ranks.size:
        return None, None
    # The slowest decides when a checkpoint is whole.
    return min(speeds) * ranks.size, min(speeds)
