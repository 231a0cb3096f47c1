"""Measures mpickpt and its peers in one run; start it with tests/benchmarks/peers.sh.

Every way saves or loads the same bytes on every rank at the same time, and is as
durable: it ends when its files are synced. The ways take turns, in another order in
each round; values are medians of the ratios within a round.
"""

import argparse
import sys
from collections.abc import Sequence

from mpickpt.bench.command import declare_arguments, measure_and_print
from mpickpt.cli.status import UsageError
from tests.benchmarks.peers.groups import GROUPS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="peers.sh", description=__doc__.splitlines()[0]
    )
    declare_arguments(parser, list(GROUPS))
    options = parser.parse_args(arguments)
    try:
        return measure_and_print(options, GROUPS)
    except UsageError as error:
        sys.stderr.write(f"peers.sh: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
