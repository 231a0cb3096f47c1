"""`mpickpt ls RUN`: the checkpoints of a run, whole or not."""

import argparse
import json
import time
from typing import Any

from mpickpt.cli.output import (
    age_text,
    nbytes_text,
    print_json,
    print_line,
    print_table,
)
from mpickpt.cli.place_arguments import add_run_argument
from mpickpt.cli.status import NO_CHECKPOINT, WHOLE
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.format.records import ShardManifest
from mpickpt.storage.contents import last_written_s
from mpickpt.storage.copy_sweep import partial_copy
from mpickpt.storage.places import Place, absolute, is_directory, is_there
from mpickpt.storage.remote_run import run_at
from mpickpt.storage.run_entry import RejectedEntry, Run, RunEntry
from mpickpt.storage.step_directories import NamedStep, named_steps

# How long nothing may have been written before a save counts as interrupted.
_SAVING_S = 600

_COLUMNS = (
    *(">step", ">age", ">size", ">ranks", "state"),
    *("pinned", "metrics", "tier", "directory"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print one line for each directory of a step; no shard is opened for it."""
    entries = _entries(run_at(options.run_dir))
    if options.json:
        print_json(entries)
    elif entries:
        print_table(_COLUMNS, [_row(entry) for entry in entries])
    else:
        print_line(f"no checkpoints in {absolute(options.run_dir)}{_instead(options)}")
    is_any_whole = any(entry["state"] == "whole" for entry in entries)
    return WHOLE if is_any_whole else NO_CHECKPOINT


def _instead(options: argparse.Namespace) -> str:
    if not is_there(options.run_dir / MANIFEST_NAME):
        return ""
    return (
        f", which is one itself, of the run {absolute(options.run_dir).parent}; "
        "mpickpt show says what it holds"
    )


def _entries(listed: Run) -> list[dict[str, Any]]:
    published = _published(listed)
    directories = named_steps(listed.path)
    rejected = {entry.path: entry for entry in listed.rejected()}
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
            "copied": None,
            "problem": None,
        }
        if found.path in rejected:
            entry |= _of_rejected(rejected[found.path])
        elif found.path in published:
            entry |= _of_published(published[found.path])
        elif is_directory(found.path):
            entry |= _of_unpublished(found)
        else:
            continue  # removed or renamed since it was listed
        entries.append(entry)
    return entries


def _published(listed: Run) -> dict[Place, RunEntry]:
    """Return the published checkpoints by path.

    What seems damaged is looked for again: it may have been replaced or removed since
    it was listed.
    """
    published = {entry.path: entry for entry in listed.candidates()}
    while doubtful := [e for e in published.values() if not e.is_whole]:
        now = {entry.path: entry for entry in listed.candidates()}
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
        "tier": _tier_of(manifest),
        "problem": entry.problem,
    }


def _tier_of(manifest: ShardManifest | None) -> str:
    """Return the kind of tier that a manifest was copied to; "run" where it was saved.

    Other programs may have written what is read here.
    """
    tier = manifest.extra.get("tier") if manifest is not None else None
    kind = tier.get("kind") if isinstance(tier, dict) else None
    return kind if isinstance(kind, str) else "run"


def _of_rejected(entry: RejectedEntry) -> dict[str, Any]:
    return {
        "state": "rejected",
        "pinned": entry.is_pinned,
        "problem": entry.reason or None,
    }


def _of_unpublished(found: NamedStep) -> dict[str, Any]:
    copy = partial_copy(found.path)
    written_s = last_written_s(found.path) if copy is None else copy.modified_s
    state = "saving" if copy is None else "copying"
    if time.time() - written_s >= _SAVING_S:
        state = "unfinished"
    return {"state": state, "copied": None if copy is None else copy.fraction}


def _row(entry: dict[str, Any]) -> list[str]:
    size, ranks = entry["nbytes"], entry["world_size"]
    return [
        str(entry["step"]),
        "-" if size is None else age_text(entry["created_at"]),
        "-" if size is None else nbytes_text(size),
        "-" if ranks is None else str(ranks),
        _state_text(entry),
        "yes" if entry["pinned"] else "-",
        _metrics_text(entry["metrics"]),
        entry["tier"],
        entry["path"].rpartition("/")[2],
    ]


def _state_text(entry: dict[str, Any]) -> str:
    copied = entry["copied"]
    return entry["state"] if copied is None else f"{entry['state']} {copied:.0%}"


def _metrics_text(metrics: dict[str, Any]) -> str:
    words = (f"{name}={_value_text(value)}" for name, value in sorted(metrics.items()))
    return ",".join(words) or "-"


def _value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
