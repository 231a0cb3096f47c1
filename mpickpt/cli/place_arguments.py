"""What commands on runs and checkpoints take as arguments; no MPI."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mpickpt.errors import CheckpointError
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.storage.places import Place
from mpickpt.storage.remote_path import parse_place

T = TypeVar("T")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the run directory."""
    parser.add_argument(
        "run_dir", metavar="RUN", type=place, help="run directory, or its URL"
    )


def add_checkpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the directory of a checkpoint."""
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=checkpoint_place,
        help="checkpoint, a directory or URL",
    )


def place(text: str) -> Place:
    """Return the path or the URL that an argument says."""
    if not text:  # of a variable that is not set; the current directory is "."
        raise argparse.ArgumentTypeError("the path is empty")
    try:
        return parse_place(text)
    except (ValueError, CheckpointError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def local_place(instead: str) -> Callable[[str], Path]:
    """Return a parser of paths; `instead` says what to do about a URL of a store."""

    def parsed(text: str) -> Path:
        path = place(text)
        if not isinstance(path, Path):
            raise argparse.ArgumentTypeError(f"{text} is in a store; {instead}")
        return path

    return parsed


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser with its complaints as argparse shows them."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def checkpoint_place(text: str) -> Place:
    """Return the place of a checkpoint, which its manifest may stand for."""
    said = place(text)
    return said.parent if said.name == MANIFEST_NAME else said


def count(text: str) -> int:
    """Return the number that an argument says, from 1."""
    return whole_number(text, least=1)


def whole_number(text: str, *, least: int) -> int:
    """Return the number that an argument says, or complain in argparse's way."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a whole number, {least} or more"
        )
    return number
