"""`mpickpt pin RUN STEP...`: keep checkpoints whatever the rules say."""

import argparse

from mpickpt.cli.output import print_line
from mpickpt.cli.run_arguments import add_run_argument, existing_run, step
from mpickpt.cli.status import WHOLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_run_argument(parser)
    parser.add_argument("steps", metavar="STEP", type=step, nargs="+")


def run(options: argparse.Namespace) -> int:
    """Pin each step."""
    run_directory = existing_run(options)
    for number in options.steps:
        run_directory.pin(number)
        print_line(f"step {number} is pinned: neither retention nor prune removes it")
    return WHOLE
