"""`mpiexec -n N mpickpt bench`: one table of ratios, all measured in one run."""

import argparse
import os
import platform
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpickpt.bench.background import measure_blocking, measure_slowdown
from mpickpt.bench.bench import Bench, incompressible
from mpickpt.bench.ground import file_system_name, require_memory, working_directory
from mpickpt.bench.load import measure_load
from mpickpt.bench.many_arrays import measure_many_arrays
from mpickpt.bench.many_ranks import measure_many_ranks
from mpickpt.bench.memory import measure_memory
from mpickpt.bench.ranks import Ranks
from mpickpt.bench.replicas import measure_replicas
from mpickpt.bench.reshard import measure_reshard
from mpickpt.bench.rows import COLUMNS, Row
from mpickpt.bench.save import measure_save
from mpickpt.bench.startup import measure_startup
from mpickpt.bench.steps import measure_steps
from mpickpt.bench.verify import measure_verify
from mpickpt.cli.output import print_json, print_line, print_plain_table
from mpickpt.cli.place_arguments import count
from mpickpt.cli.status import FAILED, USAGE, WHOLE, UsageError
from mpickpt.parallel.world import mpi_name, world
from mpickpt.version import __version__

Measure = Callable[[Bench], list[Row]]

# Memory is first: later, what a first call costs has been paid.
GROUPS: dict[str, Measure] = {
    "memory": measure_memory,
    "save": measure_save,
    "load": measure_load,
    "verify": measure_verify,
    "many-arrays": measure_many_arrays,
    "async": measure_blocking,
    "slowdown": measure_slowdown,
    "steps": measure_steps,
    "replicas": measure_replicas,
    "reshard": measure_reshard,
    "many-ranks": measure_many_ranks,
    "startup": measure_startup,
}
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_FEWEST_ROUNDS = 5
# Of the state: itself, and a copy that is staged or loaded into, or two.
_COPIES_IN_MEMORY = 3
# Of all ranks' states: two checkpoints lie side by side.
_COPIES_ON_DISK = 2.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    declare_arguments(parser, list(GROUPS))


def declare_arguments(parser: argparse.ArgumentParser, groups: list[str]) -> None:
    """Declare where and how much is measured, and how the table is printed."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        nargs="?",
        default=Path(),
        help="existing directory to measure in, by default the current one; what is "
        "written there is removed again",
    )
    parser.add_argument(
        "--nbytes",
        metavar="SIZE",
        type=nbytes_of,
        default=512 << 20,
        help="bytes of state per rank, as in 512MiB (default)",
    )
    parser.add_argument(
        "--repeat",
        metavar="N",
        type=count,
        default=_FEWEST_ROUNDS,
        help="rounds whose median counts (5); one that does not goes before them",
    )
    parser.add_argument(
        "--only",
        metavar="GROUP,...",
        type=lambda text: _chosen(text, groups),
        default=groups,
        help=f"what to measure, of {', '.join(groups)}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Measure and print, on rank 0, one table."""
    return measure_and_print(options, GROUPS)


def measure_and_print(options: argparse.Namespace, groups: dict[str, Measure]) -> int:
    """Measure the chosen groups on the ranks of this program; print on rank 0.

    Raises
    ------
    UsageError
        On rank 0: it cannot be measured here. The other ranks just end.
    """
    try:
        ranks = Ranks(world())
    except ImportError as error:
        raise UsageError(f"bench needs mpi4py and an MPI: {error}") from error
    try:
        rows = _measured(ranks, options, groups)
    except UsageError:
        if ranks.rank == 0:
            raise
        return USAGE
    except BaseException:
        if ranks.size > 1:
            # The other ranks may wait for this one, and would for ever.
            traceback.print_exc()
            ranks.comm.Abort(FAILED)
        raise
    if ranks.rank == 0:
        _print(options, machine(ranks, options), rows)
    return WHOLE


def _measured(
    ranks: Ranks, options: argparse.Namespace, groups: dict[str, Measure]
) -> list[Row]:
    require_memory(ranks, _COPIES_IN_MEMORY * options.nbytes)
    needed = int(_COPIES_ON_DISK * ranks.size * options.nbytes)
    rows: list[Row] = []
    with working_directory(ranks, options.directory, needed) as directory:
        bench = Bench(
            ranks=ranks,
            directory=directory,
            arrays=incompressible(options.nbytes, seed=ranks.rank),
            repeat=options.repeat,
        )
        for group in options.only:
            bench.clear()
            _say(ranks, f"measuring {group}")
            rows += groups[group](bench)
    return rows


def machine(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Return where and how it was measured."""
    return {
        "file_system": file_system_name(options.directory),
        "directory": str(options.directory.resolve()),
        "host": platform.node(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": ranks.size,
        "nbytes_per_rank": options.nbytes,
        "repeat": options.repeat,
        "mpi": mpi_name(),
        "python": platform.python_version(),
        "mpickpt": __version__,
    }


def _say(ranks: Ranks, text: str) -> None:
    """Tell whoever waits how far it has come."""
    if ranks.rank == 0:
        sys.stderr.write(f"mpickpt bench: {text}\n")


def _print(options: argparse.Namespace, where: dict[str, Any], rows: list[Row]) -> None:
    if options.json:
        print_json({"machine": where, "rows": [row.document() for row in rows]})
        return
    print_line(
        f"mpickpt {where['mpickpt']} on {where['file_system']} ({where['directory']}), "
        f"{where['ranks']} ranks on {where['cores']} cores of {where['host']}, "
        f"{where['mpi']}"
    )
    print_line(
        f"medians of {options.repeat}, ways in turn; random bytes; every write synced; "
        "before reads called cold, the page cache dropped by posix_fadvise(DONTNEED)"
    )
    if options.repeat < _FEWEST_ROUNDS:
        print_line(f"fewer than {_FEWEST_ROUNDS} rounds: only to see that it runs")
    print_line()
    # Some launchers give ranks a terminal of their own, 80 columns wide.
    print_plain_table(COLUMNS, [row.cells() for row in rows])


def nbytes_of(text: str) -> int:
    """Return a number of bytes: "4096", "8KiB", "512MiB", "1GiB"."""
    match = re.fullmatch(r"(\d+) ?([KMG]iB|)", text, re.IGNORECASE)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a size as in 512MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def _chosen(text: str, groups: list[str]) -> list[str]:
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in groups]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is none of {', '.join(groups)}"
        )
    return chosen
