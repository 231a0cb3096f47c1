"""`mpickpt latest RUN`: the path of the newest checkpoint, for scripts."""

import argparse
from pathlib import Path

from mpickpt.cli.output import print_path
from mpickpt.cli.status import WHOLE
from mpickpt.errors import CheckpointNotFoundError
from mpickpt.storage.catalog import latest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")


def run(options: argparse.Namespace) -> int:
    """Print the path."""
    path = latest(options.run_dir)
    if path is None:
        raise CheckpointNotFoundError(
            f"no published checkpoint in {options.run_dir.absolute()}"
        )
    print_path(path)
    return WHOLE
