"""What the commands that copy checkpoints have in common; no MPI."""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpickpt.cli.output import nbytes_text, progress_bar, shown
from mpickpt.cli.place_arguments import argument, count
from mpickpt.planning.pace_of_bytes import BytePace
from mpickpt.planning.units import parse_rate

_LINE_EVERY_S = 10.0
_JOBS = 4


def add_copy_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how fast and how much at once."""
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        type=argument(parse_rate),
        help="as 500MB/s: leaves the rest to others",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=count,
        default=_JOBS,
        help=f"files copied at the same time, by default {_JOBS}",
    )


def pace_of(options: argparse.Namespace) -> BytePace:
    """Return the pace that was asked for."""
    return BytePace(options.bandwidth)


@contextmanager
def copy_progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show how a copy goes on: a bar on a terminal, else a line now and then.

    Yields
    ------
    callable
        To be called, from any thread, with the number of bytes just done.
    """
    if sys.stderr.isatty():
        with progress_bar(title, total) as advance:
            yield advance
    else:
        yield _Lines(title, total).advance


class _Lines:
    """Writes a line every few seconds, for the log of a job."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._begin_s = self._told_s = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, nbytes: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self._done += nbytes
            now_s = time.monotonic()
            if now_s - self._told_s < _LINE_EVERY_S:
                return
            self._told_s = now_s
            speed = nbytes_text(int(self._done / (now_s - self._begin_s)))
            text = (
                f"{self._title}: {nbytes_text(self._done)} of "
                f"{nbytes_text(self._total)}, {speed}/s"
            )
        sys.stderr.write(shown(text) + "\n")
        sys.stderr.flush()
