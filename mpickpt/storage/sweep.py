"""Sweeps what crashed saves left in a run; one process, files only, no MPI.

Only files with names of this library's own making are removed, and none that a
published checkpoint refers to.
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from mpickpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from mpickpt.format.naming import (
    ATTEMPTS_DIRECTORY,
    CONTROL_DIRECTORY,
    MANIFEST_NAME,
    METRICS_DIRECTORY,
    PINS_DIRECTORY,
    REJECTIONS_DIRECTORY,
    TMP_SUFFIX,
    parse_control_name,
    parse_mark_name,
    parse_receipts_name,
    parse_shard_name,
    receipts_name,
)
from mpickpt.storage.catalog import PathLike, read_manifest, step_directories
from mpickpt.storage.commit import discard, sync_directory
from mpickpt.storage.copy_sweep import is_copied_to
from mpickpt.storage.filesystem import is_symlink
from mpickpt.storage.lease_file import newest_claim
from mpickpt.storage.removal import (
    own_files,
    remove_directory_if_empty,
    remove_files,
    remove_old_rejected,
)
from mpickpt.storage.run_directory import RunDirectory
from mpickpt.storage.small_file import (
    control_names_in,
    discard_unfinished,
    names_in,
    remove_control_file,
)

log = logging.getLogger(__name__)

_ABOUT_CHECKPOINTS = (
    PINS_DIRECTORY,
    METRICS_DIRECTORY,
    ATTEMPTS_DIRECTORY,
    REJECTIONS_DIRECTORY,
)

_WRITTEN_BY_THEN_S = 60.0


def sweep(directory: Path) -> None:
    """Remove what no manifest refers to: the rubbish of a crash, or an older save.

    Notes
    -----
    Only names of this library's own making are touched, and nothing at all where the
    manifest cannot be read.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointNotFoundError:
        kept = set()
    except CheckpointError:
        return
    else:
        kept = {shard.path for shard in manifest.shards}
        kept |= {manifest.layout.path} if manifest.layout else set()
        kept.add(receipts_name(manifest.checkpoint_id))
    emptied = set()
    for path in own_files(directory):
        if str(path.relative_to(directory)) not in kept:
            discard(path)
            emptied.add(path.parent)
    for parent in emptied:
        sync_directory(parent)


def sweep_siblings(
    run_dir: PathLike,
    in_flight_ids: Collection[str],
    *,
    sparing: Collection[Path] = (),
) -> None:
    """Remove what crashed saves left in a run, and all but the newest rejected ones.

    Also what is said about checkpoints that are gone.

    Parameters
    ----------
    run_dir : path-like
        The run directory.
    in_flight_ids : collection of str
        Ids of the saves that are being written: their directories are left alone.
    sparing : collection of Path
        Directories that are left alone too: of a save that has no id yet.

    Notes
    -----
    For the holder of the lease. What the file system refuses is logged: rubbish
    stops no run. Pinned checkpoints stay, rejected or not, and so do copies that are
    being made: whoever makes one holds no lease.
    """
    flying = {save_id[:8] for save_id in in_flight_ids}
    spared = {os.path.abspath(path) for path in sparing}
    run = RunDirectory(run_dir)
    now_s = _time_of(run.path)
    for found in step_directories(run_dir):
        is_rubbish = not (found.is_published or found.is_rejected)
        if is_rubbish and os.path.abspath(found.path) not in spared:
            with _logged(found.path):
                _sweep_unpublished(found.path, flying, now_s)
    remove_old_rejected(run)
    with _logged(run.path):
        _forget_missing(run.path)
        _forget_unfinished(run.path)


def _sweep_unpublished(directory: Path, flying: Collection[str], now_s: float) -> None:
    # A network file system may go on saying that the manifest is not there for half
    # a minute after another host published it; listing asks the server.
    if is_symlink(directory) or MANIFEST_NAME in names_in(directory):
        return
    if is_copied_to(directory, now_s):
        return
    files = own_files(directory)
    if not any(_id_of(path.name) in flying for path in files):
        remove_files(files)
        remove_directory_if_empty(directory)


def _forget_missing(run_dir: Path) -> None:
    """Remove what is said about checkpoints of which no directory is left."""
    present = {found.path.name for found in step_directories(run_dir)}
    for directory in _ABOUT_CHECKPOINTS:
        for name in control_names_in(run_dir / directory):
            if parse_control_name(name) not in (None, *present):
                remove_control_file(run_dir / directory / name)


def _forget_unfinished(run_dir: Path) -> None:
    """Remove what crashes left of control files that were being written.

    Notes
    -----
    For the holder of the lease. Anybody may be writing one just now, so it must
    be a minute older than the last beat: two times of one file system.
    """
    until = _time_of(run_dir) - _WRITTEN_BY_THEN_S
    for directory in (CONTROL_DIRECTORY, *_ABOUT_CHECKPOINTS):
        discard_unfinished(run_dir / directory, until)


def _time_of(run_dir: Path) -> float:
    """Return when the lease was last beaten; 0, to which nothing is old, if unknown."""
    with contextlib.suppress(OSError):
        claim = newest_claim(run_dir)
        return claim.path.stat().st_mtime if claim else 0.0
    return 0.0


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        log.warning("%s was not swept: %s", path, error)


def _id_of(name: str) -> str | None:
    shard = parse_shard_name(name)
    if shard is not None:
        return shard.id8
    marked = parse_mark_name(name)
    return marked[:8] if marked else parse_receipts_name(name.removesuffix(TMP_SUFFIX))
