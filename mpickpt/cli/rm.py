"""`mpickpt rm CKPT...`: remove checkpoints, or what is left of them."""

import argparse
import contextlib
import os
from pathlib import Path

from mpickpt.cli.output import print_line
from mpickpt.cli.status import WHOLE, UsageError
from mpickpt.errors import CheckpointNotFoundError
from mpickpt.format.naming import (
    MANIFEST_NAME,
    parse_rejected_directory,
    parse_step_directory,
)
from mpickpt.storage.lease import Lease
from mpickpt.storage.removal import own_files, remove_checkpoint, remove_rejected
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.small_file import is_there


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "checkpoints",
        metavar="CKPT",
        type=_absolute,
        nargs="+",
        help="directory of a checkpoint, published or not, or of a rejected one",
    )
    parser.add_argument(
        "--force", action="store_true", help="also pinned ones and the newest good one"
    )


def run(options: argparse.Namespace) -> int:
    """Remove all of them, or none where one may not go."""
    for path in options.checkpoints:
        _require_checkpoint(path)
    run_dirs = {path.parent for path in options.checkpoints if _is_of_a_run(path)}
    with contextlib.ExitStack() as stack:
        leases = {
            run_dir: stack.enter_context(Lease.acquire(run_dir))
            for run_dir in sorted(run_dirs)
        }
        if not options.force:
            for run_dir in leases:
                _require_removable(run_dir, options.checkpoints)
        for path in options.checkpoints:
            if path.parent in leases:
                leases[path.parent].require()
            is_gone = _remove(path)
            left = "removed" if is_gone else "files that are not a checkpoint's stay"
            print_line(f"{path}: {left}")
    return WHOLE


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(text))


def _require_checkpoint(path: Path) -> None:
    is_published = is_there(path / MANIFEST_NAME)
    is_left_over = _is_of_a_run(path) and path.is_dir()
    if not is_published and not own_files(path) and not is_left_over:
        raise CheckpointNotFoundError(f"no checkpoint at {path}, nor rest of one")


def _is_of_a_run(path: Path) -> bool:
    return (
        parse_step_directory(path.name) is not None
        or parse_rejected_directory(path.name) is not None
    )


def _require_removable(run_dir: Path, paths: list[Path]) -> None:
    run_directory = RunDirectory(run_dir)
    entries = run_directory.candidates()
    pinned = [
        *(entry.path for entry in entries if entry.is_pinned),
        *(entry.path for entry in run_directory.rejected() if entry.is_pinned),
    ]
    for path in paths:
        if path in pinned:
            raise UsageError(f"{path} is pinned: unpin it first, or use --force")
    newest = next((entry.path for entry in reversed(entries) if entry.is_whole), None)
    if newest in paths:
        raise UsageError(
            f"{newest} is the newest good checkpoint of its run: to remove it anyway "
            "use --force"
        )


def _remove(path: Path) -> bool:
    run_directory = RunDirectory(path.parent)
    for entry in run_directory.rejected():
        if entry.path == path:
            return remove_rejected(run_directory, entry)
    is_gone = remove_checkpoint(path)
    step = parse_step_directory(path.name)
    if step is not None:
        run_directory.forget(step)
    return is_gone
