"""`mpickpt ls RUN`: the checkpoints of a run, whole or not."""

import argparse
from pathlib import Path
from typing import Any

from mpickpt.cli.output import (
    age_text,
    nbytes_text,
    print_json,
    print_line,
    print_table,
)
from mpickpt.cli.status import NO_CHECKPOINT, WHOLE
from mpickpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ManifestError,
    StorageError,
)
from mpickpt.storage.catalog import (
    StepDirectory,
    missing_shards,
    read_manifest,
    step_directories,
)

_COLUMNS = (">step", ">age", ">size", ">ranks", "state", "directory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print one line for each directory of a step; no shard is opened for it."""
    entries = [_described(found) for found in step_directories(options.run_dir)]
    if options.json:
        print_json(entries)
    elif entries:
        print_table(_COLUMNS, [_row(entry) for entry in entries])
    else:
        print_line(f"no checkpoints in {options.run_dir.absolute()}")
    is_there = any(entry["state"] == "complete" for entry in entries)
    return WHOLE if is_there else NO_CHECKPOINT


def _described(found: StepDirectory) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "step": found.step,
        "path": str(found.path),
        "state": "unpublished",
        "created_at": None,
        "nbytes": None,
        "world_size": None,
        "problem": None,
    }
    try:
        manifest = read_manifest(found.path)
        missing = missing_shards(found.path, manifest)
    except CheckpointNotFoundError:
        missing = []
    except CheckpointError as error:
        return entry | {"state": _state_of(error), "problem": str(error)}
    else:
        entry["state"] = "incomplete" if missing else "complete"
        entry["problem"] = f"{len(missing)} shards are missing" if missing else None
        entry["created_at"] = manifest.created_at
        entry["nbytes"] = manifest.nbytes
        entry["world_size"] = manifest.world_size
    if found.is_rejected:
        entry["state"] = "rejected"
    return entry


def _state_of(error: CheckpointError) -> str:
    if isinstance(error, ManifestError):
        return "damaged"
    return "unreadable" if isinstance(error, StorageError) else "incomplete"


def _row(entry: dict[str, Any]) -> list[str]:
    size, ranks = entry["nbytes"], entry["world_size"]
    return [
        str(entry["step"]),
        "-" if size is None else age_text(entry["created_at"]),
        "-" if size is None else nbytes_text(size),
        "-" if ranks is None else str(ranks),
        entry["state"],
        Path(entry["path"]).name,
    ]
