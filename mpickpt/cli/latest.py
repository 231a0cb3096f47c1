"""`mpickpt latest RUN`: the path of the newest checkpoint, for scripts."""

import argparse

from mpickpt.cli.output import print_path
from mpickpt.cli.place_arguments import add_run_argument
from mpickpt.cli.status import WHOLE
from mpickpt.errors import CheckpointNotFoundError
from mpickpt.storage.catalog import latest
from mpickpt.storage.places import absolute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_run_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Print the path."""
    path = latest(options.run_dir)
    if path is None:
        raise CheckpointNotFoundError(
            f"no published checkpoint in {absolute(options.run_dir)}"
        )
    print_path(path)
    return WHOLE
