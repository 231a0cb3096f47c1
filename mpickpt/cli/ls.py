"""`mpickpt ls RUN`: the checkpoints of a run, whole or not."""

import argparse
import json
import os
import time
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
from mpickpt.storage.catalog import StepDirectory, step_directories
from mpickpt.storage.removal import own_files
from mpickpt.storage.run_directory import RejectedEntry, RunDirectory, RunEntry

# How long nothing may have been written before a save counts as interrupted.
_SAVING_S = 600

_COLUMNS = (
    *(">step", ">age", ">size", ">ranks", "state"),
    *("pinned", "metrics", "tier", "directory"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print one line for each directory of a step; no shard is opened for it."""
    entries = _entries(RunDirectory(options.run_dir))
    if options.json:
        print_json(entries)
    elif entries:
        print_table(_COLUMNS, [_row(entry) for entry in entries])
    else:
        print_line(f"no checkpoints in {options.run_dir.absolute()}")
    is_there = any(entry["state"] == "whole" for entry in entries)
    return WHOLE if is_there else NO_CHECKPOINT


def _entries(run_directory: RunDirectory) -> list[dict[str, Any]]:
    published = _published(run_directory)
    directories = step_directories(run_directory.path)
    rejected = {entry.path: entry for entry in run_directory.rejected()}
    entries = []
    for found in directories:
        entry = {
            "step": found.step,
            "path": str(found.path),
            "created_at": None,
            "nbytes": None,
            "world_size": None,
            "pinned": False,
            "metrics": {},
            "tier": "run",
            "problem": None,
        }
        if found.path in rejected:
            entry |= _of_rejected(rejected[found.path])
        elif found.path in published:
            entry |= _of_published(published[found.path])
        elif found.path.is_dir():
            entry["state"] = _state_of_unpublished(found)
        else:
            continue  # removed or renamed since it was listed
        entries.append(entry)
    return entries


def _published(run_directory: RunDirectory) -> dict[Path, RunEntry]:
    """Return the published checkpoints by path.

    What seems damaged is looked for again: it may have been replaced or removed since
    it was listed.
    """
    published = {entry.path: entry for entry in run_directory.candidates()}
    while doubtful := [e for e in published.values() if not e.is_whole]:
        now = {entry.path: entry for entry in run_directory.candidates()}
        changed = {
            entry.path: now.get(entry.path)
            for entry in doubtful
            if _id_of(now.get(entry.path)) != _id_of(entry)
        }
        if not changed:
            break
        for path, entry in changed.items():
            if entry is None:
                del published[path]
            else:
                published[path] = entry
    return published


def _id_of(entry: RunEntry | None) -> tuple[bool, str | None]:
    return (False, None) if entry is None else (True, entry.checkpoint_id)


def _of_published(entry: RunEntry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "state": "whole" if entry.is_whole else "damaged",
        "created_at": entry.created_at,
        "nbytes": None if manifest is None else manifest.nbytes,
        "world_size": None if manifest is None else manifest.world_size,
        "pinned": entry.is_pinned,
        "metrics": entry.metrics,
        "problem": entry.problem,
    }


def _of_rejected(entry: RejectedEntry) -> dict[str, Any]:
    return {
        "state": "rejected",
        "pinned": entry.is_pinned,
        "problem": entry.reason or None,
    }


def _state_of_unpublished(found: StepDirectory) -> str:
    files = [found.path, *own_files(found.path)]
    age_s = time.time() - max(map(_modified_at, files))
    return "saving" if age_s < _SAVING_S else "unfinished"


def _modified_at(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0  # removed or renamed since it was listed


def _row(entry: dict[str, Any]) -> list[str]:
    size, ranks = entry["nbytes"], entry["world_size"]
    return [
        str(entry["step"]),
        "-" if size is None else age_text(entry["created_at"]),
        "-" if size is None else nbytes_text(size),
        "-" if ranks is None else str(ranks),
        entry["state"],
        "yes" if entry["pinned"] else "-",
        _metrics_text(entry["metrics"]),
        entry["tier"],
        Path(entry["path"]).name,
    ]


def _metrics_text(metrics: dict[str, Any]) -> str:
    words = (f"{name}={_value_text(value)}" for name, value in sorted(metrics.items()))
    return ",".join(words) or "-"


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
