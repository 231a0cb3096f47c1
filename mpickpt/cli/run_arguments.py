"""What the commands that change a run have in common; no MPI."""

import argparse
from pathlib import Path

from mpickpt.errors import CheckpointNotFoundError
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.small_file import is_there


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the run directory."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")


def existing_run(options: argparse.Namespace) -> RunDirectory:
    """Return the run directory; a mistyped one is an error, not made."""
    if not (is_there(options.run_dir) and options.run_dir.is_dir()):
        raise CheckpointNotFoundError(
            f"no run directory at {options.run_dir.absolute()}"
        )
    return RunDirectory(options.run_dir)


def count(text: str) -> int:
    """Return the number that an argument says, from 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def step(text: str) -> int:
    """Return the step that an argument says, from 0."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number
