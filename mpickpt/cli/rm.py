"""`mpickpt rm CKPT...`: remove checkpoints, or what is left of them."""

import argparse
import contextlib

from mpickpt.cli.output import print_line
from mpickpt.cli.place_arguments import checkpoint_place
from mpickpt.cli.run_arguments import writing_in
from mpickpt.cli.status import WHOLE, UsageError
from mpickpt.format.naming import (
    MANIFEST_NAME,
    parse_rejected_directory,
    parse_step_directory,
)
from mpickpt.storage.contents import own_files
from mpickpt.storage.found_instead import not_found
from mpickpt.storage.places import Place, absolute, is_directory, is_there
from mpickpt.storage.remote_run import run_at
from mpickpt.storage.removal import remove_checkpoint, remove_rejected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "checkpoints",
        metavar="CKPT",
        type=_absolute,
        nargs="+",
        help="checkpoint, a directory or URL; published or not, or a rejected one",
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
            run_dir: stack.enter_context(writing_in(run_dir))
            for run_dir in sorted(run_dirs, key=str)
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


def _absolute(text: str) -> Place:
    return absolute(checkpoint_place(text))


def _require_checkpoint(path: Place) -> None:
    is_published = is_there(path / MANIFEST_NAME)
    is_left_over = _is_of_a_run(path) and is_directory(path)
    if not is_published and not own_files(path) and not is_left_over:
        raise not_found(path)


def _is_of_a_run(path: Place) -> bool:
    return (
        parse_step_directory(path.name) is not None
        or parse_rejected_directory(path.name) is not None
    )


def _require_removable(run_dir: Place, paths: list[Place]) -> None:
    affected = run_at(run_dir)
    entries = affected.candidates()
    pinned = [
        *(entry.path for entry in entries if entry.is_pinned),
        *(entry.path for entry in affected.rejected() if entry.is_pinned),
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


def _remove(path: Place) -> bool:
    affected = run_at(path.parent)
    for entry in affected.rejected():
        if entry.path == path:
            return remove_rejected(affected, entry)
    is_gone = remove_checkpoint(path)
    step = parse_step_directory(path.name)
    if step is not None:
        affected.forget(step)
    return is_gone
