"""`mpickpt unpin RUN STEP...`: let the rules decide about checkpoints again."""

import argparse

from mpickpt.cli.output import print_line
from mpickpt.cli.run_arguments import add_run_argument, existing_run, step
from mpickpt.cli.status import WHOLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_run_argument(parser)
    parser.add_argument("steps", metavar="STEP", type=step, nargs="+")


def run(options: argparse.Namespace) -> int:
    """Unpin each step."""
    run_directory = existing_run(options)
    pinned = run_directory.pins()
    for number in options.steps:
        run_directory.unpin(number)
        print_line(
            f"step {number} {'is not' if number in pinned else 'was not'} pinned"
        )
    return WHOLE
