"""`mpickpt plan --params 70e9 --ranks 64`: what checkpoints cost, with formulas."""

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpickpt.cli.output import print_json, print_line, print_table
from mpickpt.cli.place_arguments import argument, count
from mpickpt.cli.status import WHOLE, UsageError
from mpickpt.planning.cost import (
    GIGABIT_LINK_BPS,
    MEMORY_BPS,
    ONE_STREAM_BPS,
    Cost,
    Job,
    Way,
    advice,
    cost_of,
    nbytes_said,
    rate_said,
    seconds_said,
)
from mpickpt.planning.units import parse_nbytes, parse_rate, parse_seconds

_COLUMNS = (
    "way",
    ">save",
    ">program waits",
    ">interval",
    ">lost per failure",
    ">overhead",
)
_SOURCES = {
    "link": "assumed: TCP payload of 1 Gbit/s Ethernet, 1448 of 1538 bytes",
    "rank": "assumed: one stream of one node, what 4 h for 1 TB amount to",
    "fs": "assumed: never the limit",
    "memory": "assumed: half of one core's copy, 14 GB/s",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    size = parser.add_argument_group("the job")
    size.add_argument("--params", metavar="N", type=_number, help="parameters: 70e9")
    size.add_argument(
        "--bytes-per-param",
        metavar="N",
        type=_number,
        help="by default 14: fp16 and three fp32 of Adam",
    )
    size.add_argument("--nbytes", metavar="SIZE", type=argument(parse_nbytes))
    size.add_argument("--ranks", metavar="P", type=count, required=True)
    size.add_argument(
        "--mtbf",
        metavar="TIME",
        type=argument(parse_seconds),
        default=4 * 3600.0,
        help="mean time between failures of the whole job, by default 4h",
    )
    size.add_argument("--step-time", metavar="TIME", type=argument(parse_seconds))
    size.add_argument("--keep", metavar="K", type=count, default=5)
    speed = parser.add_argument_group("speeds, assumed where they are not given")
    for names, what in (
        (("--link", "--gather-bandwidth"), "what arrives at rank 0"),
        (("--rank-bandwidth",), "what one rank writes durably"),
        (("--fs-bandwidth",), "what the file system takes of all ranks"),
        (("--memory-bandwidth",), "at which one rank copies its state"),
    ):
        speed.add_argument(*names, metavar="RATE", type=argument(parse_rate), help=what)
    speed.add_argument(
        "--measure",
        metavar="DIR",
        type=Path,
        help="measure what this process writes there, durably: 256 MiB",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what each way to save costs, and the formulas with their numbers."""
    sources = dict(_SOURCES)
    job = _job(options, sources)
    cost = cost_of(job)
    if options.json:
        print_json(_document(job, cost, sources))
    else:
        _print(job, cost, sources, options.step_time)
    return WHOLE


def _job(options: argparse.Namespace, sources: dict[str, str]) -> Job:
    """Return the job; note the source of each speed that is not assumed."""
    given = {
        "link": options.link,
        "rank": options.rank_bandwidth,
        "fs": options.fs_bandwidth,
        "memory": options.memory_bandwidth,
    }
    sources |= {name: "given" for name, bps in given.items() if bps is not None}
    if options.measure is not None:
        if options.rank_bandwidth is not None:
            raise UsageError("give --rank-bandwidth or --measure, not both")
        given["rank"] = _measured(options.measure)
        sources["rank"] = f"measured in {options.measure}, one process alone"
    assumed = (GIGABIT_LINK_BPS, ONE_STREAM_BPS, math.inf, MEMORY_BPS)
    link, rank, fs, memory = (
        bps if bps is not None else default
        for bps, default in zip(given.values(), assumed, strict=True)
    )
    return Job(
        nbytes=_nbytes(options),
        ranks=options.ranks,
        mtbf_s=options.mtbf,
        link_bps=link,
        rank_bps=rank,
        fs_bps=fs,
        memory_bps=memory,
        keep=options.keep,
    )


def _nbytes(options: argparse.Namespace) -> int:
    if (options.params is None) == (options.nbytes is None):
        raise UsageError("say how large the state is: either --params or --nbytes")
    if options.nbytes is None:
        per_param = 14 if options.bytes_per_param is None else options.bytes_per_param
        return max(1, int(options.params * per_param))
    if options.bytes_per_param is not None:
        raise UsageError("--bytes-per-param goes with --params, not with --nbytes")
    return int(options.nbytes)


def _measured(directory: Path) -> float:
    # Only here, for it opens files; all else is arithmetic.
    from mpickpt.storage.speed import measured_write_bps

    if not directory.is_dir():
        raise UsageError(f"--measure {directory}: no such directory")
    return measured_write_bps(directory)


def _ways(cost: Cost) -> list[Way]:
    return [cost.gather_in_turn, cost.gather, cost.shards, cost.shards_async]


def _print(
    job: Job, cost: Cost, sources: dict[str, str], step_time_s: float | None
) -> None:
    print_line(
        f"{nbytes_said(job.nbytes)} on {job.ranks} ranks, "
        f"{nbytes_said(cost.staging_nbytes)} each; the job fails every "
        f"{seconds_said(job.mtbf_s)}"
    )
    speeds = {
        "link": ("into rank 0", job.link_bps),
        "rank": ("one rank writes", job.rank_bps),
        "fs": ("the file system takes", job.fs_bps),
        "memory": ("one rank copies", job.memory_bps),
    }
    for name, (what, bps) in speeds.items():
        print_line(f"  {what + ':':24}{rate_said(bps):14}{sources[name]}")
    print_line()
    print_table(_COLUMNS, [_row(way) for way in _ways(cost)])
    print_line()
    print_line(
        f"gathering takes {cost.ratio:.1f} times as long as shards: "
        f"{seconds_said(cost.gather.save_s)} against {seconds_said(cost.shards.save_s)}"
    )
    print_line(
        f"space: ({job.keep} kept + 1 in flight) x {nbytes_said(job.nbytes)} = "
        f"{nbytes_said(cost.space_nbytes)}"
    )
    _print_how_often(job, cost, step_time_s)
    for line in advice(job, cost):
        print_line(f"advice: {line}")
    for way in _ways(cost):
        print_line()
        print_line(f"{way.name}:")
        for name, formula in way.formulas:
            print_line(f"  {name:18}{formula}")
    print_line()
    print_line("C: what the program waits; M: the mean time between failures")
    print_line("interval: Daly 2006, eq. 37 (Young 1974 for C far below M)")
    print_line("loading is taken to be as fast as saving")


def _print_how_often(job: Job, cost: Cost, step_time_s: float | None) -> None:
    rule = f"YoungDaly(mtbf_hours={job.mtbf_s / 3600:.3g})"
    if step_time_s is not None:
        steps = max(1, round(cost.shards_async.interval_s / step_time_s))
        rule += f" or EverySteps({steps})"
    print_line(f"save when={rule}, asynchronously")


def _row(way: Way) -> list[str]:
    seconds = (way.save_s, way.blocking_s, way.interval_s, way.lost_s)
    return [way.name, *map(seconds_said, seconds), f"{way.overhead:.2%}"]


def _document(job: Job, cost: Cost, sources: dict[str, str]) -> dict[str, Any]:
    speeds = {
        "link": job.link_bps,
        "rank": job.rank_bps,
        "fs": None if math.isinf(job.fs_bps) else job.fs_bps,
        "memory": job.memory_bps,
    }
    return {
        "nbytes": job.nbytes,
        "ranks": job.ranks,
        "mtbf_s": job.mtbf_s,
        "bytes_per_second": speeds,
        "sources": sources,
        "ways": [asdict(way) | {"formulas": dict(way.formulas)} for way in _ways(cost)],
        "ratio": cost.ratio,
        "keep": job.keep,
        "space_nbytes": cost.space_nbytes,
        "staging_nbytes_per_rank": cost.staging_nbytes,
        "advice": advice(job, cost),
    }


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, as in 70e9")
    return number
