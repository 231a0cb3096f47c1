"""`mpickpt halt RUN`: ask a run to save once more and stop."""

import argparse

from mpickpt.cli.output import print_line
from mpickpt.cli.run_arguments import add_run_argument, existing_run
from mpickpt.cli.status import WHOLE
from mpickpt.storage.halt_file import HaltFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_run_argument(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--reason", metavar="TEXT", default="", help="for its log")
    what.add_argument("--clear", action="store_true", help="let it go on again")


def run(options: argparse.Namespace) -> int:
    """Write the halt file, or remove it."""
    halt_file = HaltFile(existing_run(options).path)
    if options.clear:
        halt_file.remove()
        print_line(f"{options.run_dir} may go on")
    else:
        halt_file.write(options.reason)
        print_line(
            f"{options.run_dir} saves and stops at its next step; before it is started "
            f"again: mpickpt halt {options.run_dir} --clear"
        )
    return WHOLE
