"""Readers of a run while a job of four ranks writes in it at a high rate.

A case is one reader beside one activity of the writer; all readers of an activity run
at the same time. A reader sees a checkpoint that is whole, old or new, or is told that
there is none; it never takes half of one for damage, and changes nothing.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.matrix import Case, Verdict
from tests.faults.readers_journal import JournalReader
from tests.mpi_launch import REPOSITORY, Outcome, finish, kill, start

WRITER = "tests/faults/programs/readers_writer.py"
READER = "tests/faults/programs/readers_reader.py"
ACTIVITIES = ("prune", "overwrite", "reject", "sweep")
READERS = ("ls", "verify", "show", "latest", "open", "load", "evaluator")
N_RANKS = 4
SECONDS = 10.0
PATIENCE_S = 120.0
FEWEST_READS = 3
FEWEST_PUBLISHED = 10


class Readers:
    """Readers beside a writer."""

    name = "readers"

    def why_not(self) -> str | None:
        """Return None: nothing special is needed."""

    def cases(self) -> Sequence[Case]:
        """Return each activity with each reader."""
        return [
            Case(name=f"{activity}/{reader}", in_ci=activity in ("prune", "overwrite"))
            for activity in ACTIVITIES
            for reader in READERS
        ]

    def run(
        self, cases: Sequence[Case], folder: Path
    ) -> Iterator[tuple[Case, Verdict]]:
        """Run the readers of each activity side by side."""
        for activity in ACTIVITIES:
            wanted = {
                case.name.partition("/")[2]: case
                for case in cases
                if case.name.startswith(f"{activity}/")
            }
            if wanted:
                verdicts = _read_beside(activity, list(wanted), folder / activity)
                for reader, verdict in verdicts.items():
                    yield wanted[reader], verdict


SUITE = Readers()


def _read_beside(
    activity: str, readers: Sequence[str], folder: Path
) -> dict[str, Verdict]:
    folder.mkdir()
    run, journal, stop = folder / "run", folder / "journal", folder / "stop"
    arguments = [str(run), str(journal), activity, str(stop)]
    writer = start(["-m", "mpi4py", WRITER, *arguments], size=N_RANKS)
    try:
        if not _has_begun(writer, journal):
            failed = finish(writer, 0.0).output[-2000:]
            return dict.fromkeys(readers, Verdict(hung=f"no save: {failed}"))
        started = {name: _start_reader(name, folder) for name in readers}
        ends = {name: finish(one, PATIENCE_S) for name, one in started.items()}
        stop.touch()
        writer_end = finish(writer, PATIENCE_S)
    finally:
        if writer.poll() is None:
            kill(writer)
            writer.communicate(timeout=30)
    of_writer = _judged_writer(writer_end, journal)
    return {
        name: _judged(end, folder / f"{name}.json", of_writer)
        for name, end in ends.items()
    }


def _has_begun(writer: "subprocess.Popen[str]", journal: Path) -> bool:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and writer.poll() is None:
        if journal.exists() and journal.read_text().count('"published"') >= 2:
            return True
        time.sleep(0.02)
    return False


def _start_reader(name: str, folder: Path) -> "subprocess.Popen[str]":
    paths = [folder / "run", folder / "journal", name, SECONDS, folder / f"{name}.json"]
    return subprocess.Popen(
        [sys.executable, READER, *map(str, paths)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )


def _judged_writer(end: Outcome, journal: Path) -> dict[str, str]:
    if end.timed_out:
        return {"hung": f"the writer: {end.output[-2000:]}"}
    if end.returncode:
        return {"wrong_error": f"the writer: {end.output[-2000:]}"}
    seen = JournalReader(journal)
    seen.look()
    n_published = len(seen.versions)
    if n_published < FEWEST_PUBLISHED:
        return {"hung": f"only {n_published} checkpoints were published"}
    return {}


def _judged(end: Outcome, report: Path, of_writer: dict[str, str]) -> Verdict:
    if end.timed_out:
        return Verdict(hung=f"the reader: {end.output[-2000:]}")
    if end.returncode or not report.exists():
        return Verdict(wrong_error=f"the reader ended: {end.output[-2000:]}")
    seen = json.loads(report.read_text())
    columns = {column: "; ".join(t) for column, t in seen["complaints"].items() if t}
    if seen["reads"] < FEWEST_READS:
        columns["hung"] = f"only {seen['reads']} reads"
    return Verdict(**{**of_writer, **columns})
