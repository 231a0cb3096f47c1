"""The comparisons, group by group: our way and the peers' ways take turns."""

from collections.abc import Callable
from typing import Any

from mpickpt.bench.background import (
    ALONE,
    BLOCKING,
    NICE,
    PLAIN,
    begin_save,
    step_seconds,
)
from mpickpt.bench.bench import Bench, Reading
from mpickpt.bench.load import (
    disturb,
    how_cold,
    loading,
    require_loaded,
)
from mpickpt.bench.many_arrays import FIRST, LATER, ONE, saves_of_many_arrays
from mpickpt.bench.rounds import Timings, Way, shuffled
from mpickpt.bench.rows import Row, Target, at_least, at_most, not_run
from tests.benchmarks.peers.dcp import Dcp
from tests.benchmarks.peers.files import (
    gather_to_root,
    h5py_and_read_back,
    parallel_hdf5,
    torch_save,
    why_no_parallel_hdf5,
)

OURS = "mpickpt"
PARALLEL = "parallel HDF5, one shared file"
AHEAD = at_least(1)
FAR_AHEAD = at_least(1.5)


def compare_saves(bench: Bench) -> list[Row]:
    dcp = Dcp(bench)
    simple: dict[str, Way] = {
        "h5py per rank, fsync, digest by reading back": lambda: h5py_and_read_back(
            bench
        ),
        "gather to rank 0, one file": lambda: gather_to_root(bench),
        "torch.save per rank, fsync": lambda: torch_save(bench),
    }
    why = bench.ranks.from_root(why_no_parallel_hdf5)
    if not why:
        simple[PARALLEL] = lambda: parallel_hdf5(bench)
    timings = bench.take_turns({OURS: bench.save} | dcp.saves() | simple)
    rows = [_speed(bench, "save", timings, timings.fastest("PyTorch DCP"), AHEAD)]
    rows += [_speed(bench, "save", timings, name, FAR_AHEAD) for name in simple]
    if why:
        rows.append(not_run("save", f"save, against {PARALLEL}", why, FAR_AHEAD))
    return rows


def compare_loads(bench: Bench) -> list[Row]:
    dcp = Dcp(bench)
    bench.save()
    dcp.save()
    ours = Reading(loading(bench, "sha256"))
    before = disturb(bench)
    # Both checkpoints hold the same state, and each way loads into its arrays.
    timings = bench.take_turns_cold({OURS: ours, Dcp.LOAD: dcp.load})
    require_loaded(bench, before)
    return [_speed(bench, "load", timings, Dcp.LOAD, AHEAD, how_cold(bench, ours))]


def compare_many_arrays(bench: Bench) -> list[Row]:
    with saves_of_many_arrays(bench) as (ways, count):
        dcp = Dcp(bench, many=True)
        ways.pop(ONE)
        timings = bench.take_turns(ways | dcp.saves())
    peer = timings.fastest("PyTorch DCP")
    millis = ", ".join(map(timings.millis_text, (FIRST, LATER, peer)))
    return [
        Row(
            group="many-arrays",
            subject=f"{name}, {count:,} arrays x 4 KiB per rank, against {peer}",
            value=timings.ratio(peer, name),
            target=target,
            how=millis,
            seconds=timings.seconds if name == FIRST else {},
        )
        for name, target in ((FIRST, at_least(8)), (LATER, at_least(40)))
    ]


def time_blocking(bench: Bench, begins: dict[str, Callable[[], Any]]) -> Timings:
    """Return how long each way of beginning a save holds up the program."""
    timings = Timings({name: [] for name in begins})
    for number in range(bench.repeat + 1):
        for name in shuffled([*begins], number):
            bench.clear()
            pending: list[Any] = []
            seconds = bench.ranks.timed(
                lambda name=name, pending=pending: pending.append(begins[name]())
            )
            pending[0].result()
            if number:
                timings.seconds[name].append(seconds)
    return timings


def compare_blocking(bench: Bench) -> list[Row]:
    dcp = Dcp(bench)
    begins = {BLOCKING: lambda: begin_save(bench)} | dcp.begins()
    timings = time_blocking(bench, begins)
    peer = timings.fastest("async_save")
    return [
        Row(
            group="async",
            subject=f"asynchronous save blocks, times {peer}",
            value=timings.ratio(BLOCKING, peer),
            target=at_most(0.5),
            how=", ".join(map(timings.millis_text, begins)),
            seconds=timings.seconds,
        )
    ]


def compare_slowdown(bench: Bench) -> list[Row]:
    begins = {name: None for name in (ALONE, NICE, PLAIN)} | Dcp(bench).begins()
    steps = Timings({name: [] for name in begins})
    lasted = Timings({name: [] for name in begins})
    for number in range(bench.repeat + 1):
        for name in shuffled([*begins], number):
            bench.clear()
            seconds, lasted_s = step_seconds(bench, name, begins[name])
            if number:
                steps.seconds[name].append(seconds)
                lasted.seconds[name].append(lasted_s)
    return [
        Row(
            group="slowdown",
            subject=f"a step of compute during a background save, {name}",
            value=steps.ratio(name, ALONE),
            how=f"the save took {lasted.median(name):.2f} s",
            seconds=steps.seconds if name == NICE else {},
        )
        for name in begins
        if name != ALONE
    ]


GROUPS = {
    "save": compare_saves,
    "load": compare_loads,
    "many-arrays": compare_many_arrays,
    "async": compare_blocking,
    "slowdown": compare_slowdown,
}


def _speed(
    bench: Bench,
    group: str,
    timings: Timings,
    peer: str,
    target: Target,
    how: str = "",
) -> Row:
    rates = (timings.rate_text(name, bench.total_nbytes) for name in (OURS, peer))
    return Row(
        group=group,
        subject=f"{group}, times as fast as {peer}",
        value=timings.ratio(peer, OURS),
        target=target,
        how="; ".join(filter(None, (", ".join(rates), how))),
        seconds={name: timings.seconds[name] for name in (OURS, peer)},
    )
