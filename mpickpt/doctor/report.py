"""Prints what was found and what follows from it, for people or as JSON."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from mpickpt.cli.output import print_json, print_line
from mpickpt.doctor.place_words import failure_lines, place_lines, version_lines
from mpickpt.doctor.ranks_words import ranks_lines
from mpickpt.doctor.tried_words import behaviour_lines, speed_lines
from mpickpt.doctor.words import Lines
from mpickpt.planning.findings import Advice, Findings

_WIDTH = 100
_LABEL_WIDTH = 22


def print_report(
    findings: Findings, advice: Sequence[Advice], *, as_json: bool
) -> None:
    """Print all of it."""
    if as_json:
        print_json(document(findings, advice))
        return
    host = findings.host
    if findings.n_ranks > 1:
        ranks = (
            f"{findings.n_ranks} ranks on {findings.n_hosts} nodes, the first {host}"
        )
        host = ranks.replace("1 nodes, the first", "1 node,")
    print_line(
        f"mpickpt {findings.versions.mpickpt} looks at {findings.directory}, {host}"
    )
    for title, lines in _sections(findings):
        print_section(title, list(lines))
    print_advice(advice)


def document(findings: Findings, advice: Sequence[Advice]) -> dict[str, Any]:
    """Return the same as JSON; the names of figures end with their units."""
    return {
        **asdict(findings),
        "advice": [asdict(said) for said in advice],
        "is_well": not any(said.is_grave for said in advice),
    }


def _sections(findings: Findings) -> Iterator[tuple[str, Lines]]:
    yield "file system", place_lines(findings)
    yield "what it does", behaviour_lines(findings.tried)
    yield "how fast one process is", speed_lines(findings)
    yield "what the ranks see", ranks_lines(findings)
    yield "versions", version_lines(findings)
    yield "what did not work", failure_lines(findings)


def print_section(title: str, lines: Sequence[tuple[str, str]]) -> None:
    """Print a section, if there is anything in it."""
    if not lines:
        return
    print_line()
    print_line(title)
    for label, text in lines:
        wrapped = textwrap.wrap(text, _WIDTH - _LABEL_WIDTH - 2) or [""]
        for number, part in enumerate(wrapped):
            name = "" if number else label
            print_line(f"  {name:{_LABEL_WIDTH}}{part}")


def print_advice(advice: Sequence[Advice]) -> None:
    """Print what a user should know, and in a last line whether all is well."""
    for line in _advice_lines(advice):
        print_line(line)


def _advice_lines(advice: Sequence[Advice]) -> Iterator[str]:
    yield ""
    for said in advice:
        mark = "PROBLEM" if said.is_grave else "advice"
        yield from _wrapped(f"{mark}: ", said.what)
        yield from _wrapped("  why: ", said.why)
        yield from _wrapped("  do:  ", said.remedy)
    grave = list(dict.fromkeys(said.about for said in advice if said.is_grave))
    if grave:
        yield f"checkpoints here would fail or be lost: {', '.join(grave)}"
    elif advice:
        yield "checkpoints are safe here"
    else:
        yield "all is well"


def _wrapped(mark: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * max(len(mark), 7),
        break_long_words=False,
    )
