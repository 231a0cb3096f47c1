"""Prints tables, JSON and progress; rich is imported on a terminal only."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from mpickpt.storage.places import Place

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def is_terminal() -> bool:
    """Tell whether a person looks at standard output."""
    return sys.stdout.isatty()


def print_line(text: str = "") -> None:
    """Print one line."""
    sys.stdout.write(shown(text) + "\n")


def print_warning(text: str) -> None:
    """Print a line to standard error, which a person reads and no script."""
    sys.stderr.write(f"mpickpt: warning: {shown(text)}\n")


def print_path(path: Place) -> None:
    """Print a path that a script is going to use: nothing in it is escaped for it."""
    sys.stdout.write(f"{shown(str(path)) if is_terminal() else path}\n")


def print_json(document: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows below their column names; those that begin with ">" are set right.

    Parameters
    ----------
    columns : sequence of str
        Names, ">" before those of numbers.
    rows : sequence of sequences of str
        One text for each column.
    """
    if is_terminal():
        _print_rich_table(columns, [[shown(cell) for cell in row] for row in rows])
    else:
        print_plain_table(columns, rows)


def print_plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as `print_table` does, but one row a line whatever its width."""
    clean = [[shown(cell) for cell in row] for row in rows]
    names = [name.removeprefix(">") for name in columns]
    widths = [max(map(len, column)) for column in zip(names, *clean, strict=True)]
    for row in [names, *clean]:
        cells = [
            cell.rjust(width) if name.startswith(">") else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def shown(text: str) -> str:
    """Return text with control characters escaped, which could steer a terminal."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or _is_of_a_path(c) else _escaped(c) for c in text
    )


def nbytes_text(nbytes: int | None) -> str:
    """Return a number of bytes as a person reads it: "1.5 GiB"."""
    if nbytes is None:
        return "?"
    size = float(nbytes)
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"


def age_text(created_at: str) -> str:
    """Return the time since a time stamp of a manifest: "3 h"."""
    try:
        created = datetime.fromisoformat(created_at)
    except ValueError:
        return "?"
    seconds = max(0, int((datetime.now(UTC) - created).total_seconds()))
    unit, length = next(((unit, n) for unit, n in _AGES if seconds >= n), _AGES[-1])
    return f"{seconds // length} {unit}"


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar while bytes are worked through, if a person looks.

    Yields
    ------
    callable
        To be called, from any thread, with the number of bytes just done.
    """
    if not sys.stderr.isatty():
        yield _ignored
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TransferSpeedColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(shown(title), total=total)
        yield lambda nbytes: progress.advance(task, nbytes)


def _print_rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _ignored(nbytes: int) -> None:
    """Take the place of a bar that nobody would see."""


def _is_of_a_path(character: str) -> bool:
    # How Python holds the bytes of a file name that are not UTF-8.
    return "\udc80" <= character <= "\udcff"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
