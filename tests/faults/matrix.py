"""The fault matrix: what a case is, what can be wrong with one, and the table.

A suite makes cases and runs them; each case injects one fault into one save, load or
removal and looks at what is left. `python -m tests.faults` runs them (README.md).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault at one place.

    Attributes
    ----------
    name : str
        Words joined by "/", unique in its suite and the same at every run:
        ``sync/rank2/pwrite64-1/ENOSPC``.
    in_ci : bool
        Whether the short part runs it too.
    """

    name: str
    in_ci: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was wrong with a case: each field says what was seen, "" if nothing.

    Attributes
    ----------
    lost : str
        Neither the older nor the newer checkpoint loads byte for byte, or the next
        start cannot resume and save.
    silent : str
        Wrong bytes, or a failure, that nobody was told of; a save that returned
        without a durable, whole checkpoint.
    hung : str
        A rank that was still waiting past its deadline.
    wrong_error : str
        Another error than ours, another one on another rank, or one that does not
        name rank, host, path and errno, or outcome and missing ranks.
    rubbish : str
        Files that the next save left lying, or a file touched outside the directory.
    """

    lost: str = ""
    silent: str = ""
    hung: str = ""
    wrong_error: str = ""
    rubbish: str = ""

    @property
    def complaints(self) -> dict[str, str]:
        """Return what was wrong by column; empty when nothing was."""
        seen = {column: getattr(self, column) for column in COLUMNS}
        return {column: text for column, text in seen.items() if text}


COLUMNS = tuple(column.name for column in fields(Verdict))


class Suite(Protocol):
    """A family of faults. Its module has one, named ``SUITE``."""

    name: str

    def why_not(self) -> str | None:
        """Return what this machine lacks for the suite, or None."""

    def cases(self) -> Sequence[Case]:
        """Return all cases, always in the same order."""

    def run(
        self, cases: Sequence[Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run these cases below an empty folder; each comes out once, in any order."""


@dataclass(slots=True)
class Tally:
    """The cases of one suite counted, and those with a complaint."""

    suite: str
    n_cases: int = 0
    failed: dict[str, Verdict] = field(default_factory=dict)
    not_run: str = ""
    seconds: float = 0.0

    def add(self, case: Case, verdict: Verdict) -> None:
        """Count a case."""
        self.n_cases += 1
        if verdict.complaints:
            self.failed[case.name] = verdict

    def count(self, column: str) -> int:
        """Return how many cases have a complaint of a kind."""
        return sum(column in verdict.complaints for verdict in self.failed.values())


def closing_table(tallies: Iterable[Tally]) -> str:
    """Return the table of figures: a line a suite, and the sum."""
    tallies = list(tallies)
    heading = ["suite", "cases", *(c.replace("_", " ") for c in COLUMNS), "seconds"]
    lines = [heading, *(_line_of(tally) for tally in tallies)]
    total = Tally("all", sum(tally.n_cases for tally in tallies))
    total.seconds = sum(tally.seconds for tally in tallies)
    sums = [str(sum(tally.count(c) for tally in tallies)) for c in COLUMNS]
    lines.append([total.suite, str(total.n_cases), *sums, f"{total.seconds:.0f}"])
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    rows = [_row(line, widths) for line in lines]
    rows.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    notes = [
        f"not run: {tally.suite}: {t}" for tally in tallies if (t := tally.not_run)
    ]
    return "\n".join([*rows, *notes])


def _line_of(tally: Tally) -> list[str]:
    counts = [str(tally.count(column)) for column in COLUMNS]
    return [tally.suite, str(tally.n_cases), *counts, f"{tally.seconds:.0f}"]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    padded = [first.ljust(widths[0])]
    padded += [c.rjust(w) for c, w in zip(others, widths[1:], strict=True)]
    return "| " + " | ".join(padded) + " |"
