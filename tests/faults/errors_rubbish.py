"""Tells which files of a run directory belong to nothing that is published."""

from pathlib import Path

from mpickpt import CheckpointError
from mpickpt.format.naming import (
    LEASE_DIRECTORY,
    METRICS_DIRECTORY,
    REJECTIONS_DIRECTORY,
    parse_lease_name,
)
from mpickpt.storage.catalog import step_directories
from tests.crash.small_state import files_named_by_manifest, files_of


def rubbish_in(run: Path) -> list[str]:
    """Return files, and step directories without a manifest, that should not be."""
    found = {path for path in files_of(run) if not path.startswith("step-")}
    names = set()
    for entry in step_directories(run):
        name = entry.path.name
        names.add(name)
        try:
            own = files_named_by_manifest(entry.path)
        except CheckpointError:
            found |= {f"{name}/", *(f"{name}/{path}" for path in files_of(entry.path))}
        else:
            found |= {f"{name}/{path}" for path in files_of(entry.path) - own}
    found -= {f"{METRICS_DIRECTORY}/lock"}
    found -= {
        f"{d}/{n}.json"
        for d in (METRICS_DIRECTORY, REJECTIONS_DIRECTORY)
        for n in names
    }
    leases = sorted(path for path in found if path.startswith(f"{LEASE_DIRECTORY}/"))
    if len(leases) == 1 and parse_lease_name(Path(leases[0]).name) is not None:
        found -= set(leases)
    return sorted(found)
