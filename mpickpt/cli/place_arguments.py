"""What commands on runs and checkpoints take as arguments; no MPI."""

import argparse

from mpickpt.errors import CheckpointError
from mpickpt.storage.places import Place
from mpickpt.storage.remote_path import parse_place


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the run directory."""
    parser.add_argument(
        "run_dir", metavar="RUN", type=place, help="run directory, or its URL"
    )


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the directory of a checkpoint."""
    parser.add_argument(
        "checkpoint", metavar="CKPT", type=place, help="checkpoint, a directory or URL"
    )


def place(text: str) -> Place:
    """Return the path or the URL that an argument says."""
    try:
        return parse_place(text)
    except (ValueError, CheckpointError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(text: str) -> int:
    """Return the number that an argument says, from 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number
