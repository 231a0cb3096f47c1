"""What happens in a stretch of a soak, by its seed; and what rubbish is. No MPI."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpickpt.format.naming import document_name
from mpickpt.storage.catalog import step_directories
from mpickpt.storage.removal import KEPT_REJECTED
from tests.crash.small_state import files_named_by_manifest, files_of

ENDS = {
    "rank": 6,
    "all": 3,
    "tree": 3,
    "SIGTERM": 2,
    "SIGUSR1": 2,
    "prune-unpublish": 2,
    "prune-files": 2,
    "prune-directory": 2,
    "body": 1,
    "close": 1,
}
SIZES = {4: 8, 1: 1, 3: 1, 6: 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the run.

    Attributes
    ----------
    seed : str
        Of all that the ranks throw dice for.
    size : int
        Number of ranks.
    n_cycles : int
        Cycles before the end begins.
    end : str
        How the start ends; see `ENDS`.
    victim : int
        The rank that it is done to.
    verify, progress : str
        As in `restore_latest` and `CheckpointManager`.
    floor : int or None
        The step that was told to be published last.
    """

    seed: str
    size: int
    n_cycles: int
    end: str
    victim: int
    verify: str
    progress: str
    floor: int | None = None


def starts_of(stretch: str, n_starts: int) -> Iterator[Start]:
    """Yield the starts of a stretch, the same at every run."""
    dice = random.Random(stretch)
    for number in range(n_starts):
        size = dice.choices(list(SIZES), list(SIZES.values()))[0]
        yield Start(
            seed=f"{stretch} {number}",
            size=size,
            n_cycles=dice.randint(5, 10),
            end=dice.choices(list(ENDS), list(ENDS.values()))[0],
            victim=dice.randrange(size),
            verify=dice.choice(["sha256", "crc32"]),
            progress=dice.choice(["thread", "thread", "poll"]),
        )


def rubbish_in(run: Path) -> list[str]:
    """Return what no checkpoint and no rule needs, once a start has saved."""
    found, rejected = [], set()
    for directory in step_directories(run):
        name = directory.path.name
        if directory.is_rejected:
            rejected.add(name)
        elif not directory.is_published:
            found.append(f"{name}: {sorted(files_of(directory.path))}")
        else:
            extra = files_of(directory.path) - files_named_by_manifest(directory.path)
            found += [f"{name}/{file}" for file in sorted(extra)]
    control = files_of(run / ".mpickpt")
    unpinned = {name for name in rejected if f"pins/{name}" not in control}
    if len(unpinned) > KEPT_REJECTED:
        found.append(f"rejected checkpoints: {sorted(unpinned)}")
    published = {d.path.name for d in step_directories(run)}
    found += [f".mpickpt/{n}" for n in sorted(control) if not _is_wanted(n, published)]
    if sum(name.startswith("lease/") for name in control) > 1:
        found.append(f"leases: {sorted(control)}")
    return found


def _is_wanted(name: str, directories: set[str]) -> bool:
    kind, _, file = name.rpartition("/")
    if kind == "pins":
        return file in directories
    if kind in ("metrics", "rejected"):
        return file in {document_name(directory) for directory in directories}
    return kind == "lease"
