"""A writer's journal of what it publishes and removes, and what readers may see of it.

One line for each event, before and after it; all processes of a host share a clock.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Span:
    """A span of time, ends included; one that goes on has no end yet."""

    begin_s: float
    end_s: float = math.inf

    def meets(self, other: "Span") -> bool:
        """Tell whether some time belongs to both."""
        return self.begin_s <= other.end_s and other.begin_s <= self.end_s

    def covers(self, other: "Span") -> bool:
        """Tell whether all of the other belongs to this one."""
        return self.begin_s <= other.begin_s and other.end_s <= self.end_s


@dataclass(slots=True)
class Version:
    """What a directory may have held during a span: one of several saves of a step."""

    directory: str
    number: int
    span: Span


class JournalWriter:
    """Writes events; for one process."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._descriptor = os.open(path, flags, 0o666)

    def note(self, event: str, directory: str, version: int = -1) -> None:
        """Write one event, with the time."""
        line = json.dumps([event, directory, version, time.monotonic()]) + "\n"
        os.write(self._descriptor, line.encode())

    @contextlib.contextmanager
    def publishing(self, directory: str, version: int) -> Iterator[None]:
        """Note that the body publishes a checkpoint."""
        self.note("publishing", directory, version)
        try:
            yield
        except BaseException:
            self.note("failed", directory)
            raise
        self.note("published", directory)

    @contextlib.contextmanager
    def removing(self, directory: str) -> Iterator[None]:
        """Note that the body takes a checkpoint away."""
        self.note("removing", directory)
        yield
        self.note("removed", directory)


class JournalReader:
    """Reads what the writer has noted so far."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""
        self._now: dict[str, list[Version]] = {}
        self._stays: dict[str, list[Span]] = {}
        self.versions: list[Version] = []

    def look(self) -> None:
        """Read on."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            self._take(*json.loads(line))

    def may_be_seen(self, span: Span) -> set[tuple[str, int]]:
        """Return the directories and versions that can have been there in a span."""
        seen = (version for version in self.versions if version.span.meets(span))
        return {(version.directory, version.number) for version in seen}

    def must_be_seen(self, span: Span) -> set[str]:
        """Return the directories that held a checkpoint all through a span."""
        return {
            directory
            for directory, stays in self._stays.items()
            if any(stay.covers(span) for stay in stays)
        }

    def _take(self, event: str, directory: str, version: int, at_s: float) -> None:
        now = self._now.setdefault(directory, [])
        stays = self._stays.setdefault(directory, [])
        if event == "publishing":
            now.append(Version(directory, version, Span(at_s)))
            self.versions.append(now[-1])
        elif event == "published":
            self._end(now[:-1], at_s)
            del now[:-1]
            if not stays or stays[-1].end_s < at_s:
                stays.append(Span(at_s))
        elif event == "failed":
            self._end([now.pop()], at_s)
        elif event == "removing" and stays:
            stays[-1].end_s = min(at_s, stays[-1].end_s)
        elif event == "removed":
            self._end(now, at_s)
            now.clear()

    def _end(self, versions: list[Version], at_s: float) -> None:
        for version in versions:
            version.span.end_s = at_s
