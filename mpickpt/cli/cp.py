"""`mpickpt cp CKPT DST`: copy a checkpoint to another directory or store, verified."""

import argparse
import time
from pathlib import Path

from mpickpt.cli.copy_options import add_copy_arguments, copy_progress, pace_of
from mpickpt.cli.output import nbytes_text, print_line
from mpickpt.cli.place_arguments import checkpoint_place
from mpickpt.cli.status import WHOLE, UsageError
from mpickpt.errors import CheckpointError
from mpickpt.format.naming import (
    CONTROL_DIRECTORY,
    MANIFEST_NAME,
    parse_rejected_directory,
    parse_step_directory,
    step_directory_name,
)
from mpickpt.format.records import ShardManifest
from mpickpt.storage.catalog import read_manifest
from mpickpt.storage.copy_target import CopyControl, files_of
from mpickpt.storage.copying import (
    copy_shards,
    is_published,
    publish_copy,
)
from mpickpt.storage.places import Place
from mpickpt.storage.remote_path import parse_place
from mpickpt.storage.small_file import names_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "source",
        metavar="CKPT",
        type=checkpoint_place,
        help="checkpoint, a directory or a URL",
    )
    parser.add_argument(
        "target",
        metavar="DST",
        help="directory or URL of the copy; with a slash at its end, or where it is a "
        "run, the run that gets it",
    )
    add_copy_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Copy what is not there yet, publish it, and say so."""
    source: Place = options.source
    manifest = read_manifest(source)
    target = _target(options.target, manifest)
    if is_published(target, manifest):
        publish_copy(target, manifest)
        print_line(f"{target}: this checkpoint is there already")
        return WHOLE
    begin_s = time.monotonic()
    ranks = range(manifest.world_size)
    total = sum(record.nbytes for record in files_of(manifest, ranks))
    with copy_progress(target.name, total) as progress:
        control = CopyControl(pace=pace_of(options), progress=progress)
        moved = copy_shards(
            manifest, source, target, ranks, control=control, jobs=options.jobs
        )
    publish_copy(target, manifest)
    seconds = time.monotonic() - begin_s
    rest = "" if moved == total else f"; {nbytes_text(total - moved)} were there"
    print_line(f"{target}: copied {nbytes_text(moved)} in {seconds:.1f} s{rest}")
    return WHOLE


def _target(text: str, manifest: ShardManifest) -> Place:
    try:
        given = parse_place(text)
    except (ValueError, CheckpointError) as error:
        raise UsageError(str(error)) from error
    if text.endswith("/") or _is_run(given):
        return given / step_directory_name(manifest.step)
    return given


def _is_run(target: Place) -> bool:
    """Tell whether checkpoints lie in a place, or what belongs to a run."""
    if isinstance(target, Path):
        names = names_in(target) if target.is_dir() else []
        is_checkpoint = MANIFEST_NAME in names
    else:
        names = target.store.directories()
        is_checkpoint = target.store.stat(MANIFEST_NAME) is not None
    return not is_checkpoint and any(
        name == CONTROL_DIRECTORY
        or parse_step_directory(name) is not None
        or parse_rejected_directory(name) is not None
        for name in names
    )
