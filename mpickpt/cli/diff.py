"""`mpickpt diff A B`: in what two checkpoints differ."""

import argparse

import msgspec

from mpickpt.cli.output import print_json, print_line
from mpickpt.cli.place_arguments import checkpoint_place
from mpickpt.cli.status import DIFFERENT, WHOLE
from mpickpt.storage.checkpoint_reader import open_checkpoint
from mpickpt.storage.comparison import Difference, compare

_MOST_CHARACTERS = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "a", metavar="A", type=checkpoint_place, help="checkpoint, a directory or URL"
    )
    parser.add_argument("b", metavar="B", type=checkpoint_place, help="another one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print each difference; of an array, the first index at which it differs."""
    found = []
    with open_checkpoint(options.a) as a, open_checkpoint(options.b) as b:
        for difference in compare(a, b):
            found.append(difference)
            if not options.json:
                print_line(_told(difference))
    if options.json:
        print_json(msgspec.to_builtins(found))
    return DIFFERENT if found else WHOLE


def _told(difference: Difference) -> str:
    place = difference.key
    if difference.index is not None:
        place += str(list(difference.index))
    if difference.rank is not None:
        place += f" of rank {difference.rank}"
    sides = f"{_short(difference.a)} | {_short(difference.b)}"
    return f"{place}: {difference.what}: {sides}"


def _short(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return text[: _MOST_CHARACTERS - 1] + "…"
