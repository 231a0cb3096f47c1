"""Times what a file system does for durability and names, in a directory for that.

As in `probes`: files are left to the caller, who is told of a refusal by an OSError.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from mpickpt.planning.probed import CreatingFound, Timing, timing_of
from mpickpt.storage.commit import (
    close_file,
    create_file,
    sync_directory,
    sync_file,
)
from mpickpt.storage.shard_file import new_shard_file


@dataclass(frozen=True, slots=True)
class Often:
    """How often to do what is timed: at least once.

    Parameters
    ----------
    count : int
        So often,
    budget_s : float
        but nothing is begun after so many seconds.
    """

    count: int
    budget_s: float


def probe_directory_sync(directory: Path, often: Often) -> Timing:
    """Sync a directory, in which a name is new each time."""
    place = directory / "synced"
    place.mkdir()
    names = iter(range(often.count))

    def sync() -> float:
        touch(place / f"{next(names)}")
        begin = perf_counter()
        sync_directory(place)
        return perf_counter() - begin

    return series(sync, often)


def probe_sync(directory: Path, nbytes: int, often: Often) -> Timing:
    """Write so many bytes to the end of a file and sync it; the sync is timed."""
    path = directory / f"sync-{nbytes}"
    with new_shard_file(path, nbytes=nbytes * often.count, direct=False) as file:
        offsets = iter(range(0, nbytes * often.count, nbytes))

        def sync() -> float:
            file.write_at(memoryview(os.urandom(nbytes)), next(offsets))
            begin = perf_counter()
            sync_file(file.descriptor, path)
            return perf_counter() - begin

        return series(sync, often)


def probe_creating(directory: Path, often: Often) -> CreatingFound:
    """Make many small files in a directory of their own, and remove them."""
    place = directory / "many"
    place.mkdir()
    names: list[Path] = []

    def create() -> float:
        path = place / f"{len(names):05d}"
        begin = perf_counter()
        touch(path, b"small")
        names.append(path)
        return perf_counter() - begin

    begin = perf_counter()
    series(create, often)
    created = perf_counter()
    for path in names:
        path.unlink()
    removed = perf_counter()
    return CreatingFound(
        n_files=len(names),
        creates_per_s=len(names) / (created - begin),
        removes_per_s=len(names) / (removed - created),
    )


def series(call: Callable[[], float], often: Often) -> Timing:
    """Call so often; each call returns its own time."""
    seconds: list[float] = []
    end = perf_counter() + often.budget_s
    while len(seconds) < often.count and (not seconds or perf_counter() < end):
        seconds.append(call())
    return timing_of(seconds)


def touch(path: Path, content: bytes = b"") -> None:
    """Create a file with a few bytes in it, not durably."""
    descriptor = create_file(path)
    try:
        os.write(descriptor, content)
    finally:
        close_file(descriptor, path)
