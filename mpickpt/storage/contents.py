"""Tells what lies in the directory of a checkpoint, by names and sizes; reads only."""

import os
import stat
from pathlib import Path
from typing import overload

from mpickpt.errors import IncompleteCheckpointError, StorageError
from mpickpt.format.local_tier import has_layout_here, shards_here
from mpickpt.format.naming import (
    MANIFEST_NAME,
    is_own_file,
    parse_shard_name,
    parse_shard_subdirectory,
    receipts_name,
    shard_subdirectories,
)
from mpickpt.format.records import ShardManifest
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.filesystem import is_directory, is_symlink
from mpickpt.storage.places import Place, PlaceLike
from mpickpt.storage.remote_path import RemotePath, parse_place
from mpickpt.storage.second_look import is_gone
from mpickpt.storage.shard_file import is_no_file, open_shard_file
from mpickpt.storage.small_file import names_in


def missing_shards(directory: PlaceLike, manifest: ShardManifest) -> list[str]:
    """Return the paths of shards that are not there, by listing names alone."""
    present = _relative_names(parse_place(directory), manifest.world_size)
    return [shard.path for shard in manifest.shards if shard.path not in present]


def rubbish(directory: PlaceLike, manifest: ShardManifest) -> list[str]:
    """Return the files that a crashed or replaced save left beside a checkpoint.

    Only names that the library builds; files of others are no business of ours.
    """
    used = {shard.path for shard in manifest.shards} | {MANIFEST_NAME}
    used.add(receipts_name(manifest.checkpoint_id))
    if manifest.layout is not None:
        used.add(manifest.layout.path)
    names = _relative_names(parse_place(directory), manifest.world_size)
    return sorted(name for name in names - used if is_own_file(name.rpartition("/")[2]))


def wrong_files(directory: Place, manifest: ShardManifest) -> list[str]:
    """Return the files that are missing or have another size, shards first.

    Raises
    ------
    StorageError
        If the file system or the store refuses.

    Notes
    -----
    One look at each file; of a store one listing. On a node's disk only those files
    are wanted that the manifest says are there.
    """
    wanted = [(shard.path, shard.nbytes) for shard in shards_here(manifest)]
    if manifest.layout is not None and has_layout_here(manifest):
        wanted.append((manifest.layout.path, manifest.layout.nbytes))
    if isinstance(directory, RemotePath):
        sizes = {found.name: found.nbytes for found in directory.store.list()}
        return [path for path, nbytes in wanted if sizes.get(path) != nbytes]
    return [path for path, n in wanted if not _has_size(directory / path, n)]


@overload
def own_files(directory: Path) -> list[Path]: ...


@overload
def own_files(directory: RemotePath) -> list[RemotePath]: ...


def own_files(directory: Place) -> list[Path] | list[RemotePath]:
    """Return the files in a checkpoint's directory that are this library's.

    Written ones and those being written, the manifest excepted.
    """
    if isinstance(directory, RemotePath):
        names = [one.name for one in directory.store.list() if _is_own(one.name)]
        return [directory / name for name in sorted(names)]
    found = [directory / name for name in names_in(directory) if is_own_file(name)]
    for name in names_in(directory):
        inner = directory / name
        is_shard_directory = parse_shard_subdirectory(name) is not None
        if is_shard_directory and is_directory(inner) and not is_symlink(inner):
            found += [inner / n for n in names_in(inner) if parse_shard_name(n)]
    return sorted(found)


def last_written_s(directory: Place) -> float:
    """Return when anything of the library's was last written there, in Unix time.

    Zero where nothing is.
    """
    if isinstance(directory, RemotePath):
        found = (one for one in directory.store.list() if _is_own(one.name))
        return max((one.modified_s or 0.0 for one in found), default=0.0)
    return max(map(_modified_at, [directory, *own_files(directory)]))


def _is_own(relative: str) -> bool:
    inner, _, name = relative.rpartition("/")
    if not inner:
        return is_own_file(name)
    is_shard_directory = parse_shard_subdirectory(inner) is not None
    return is_shard_directory and parse_shard_name(name) is not None


def _modified_at(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0  # removed or renamed since it was listed


def _relative_names(directory: Place, world_size: int) -> set[str]:
    if isinstance(directory, RemotePath):
        return {found.name for found in directory.store.list()}
    names = set(names_in(directory))
    for inner in names.intersection(shard_subdirectories(world_size)):
        names.update(f"{inner}/{name}" for name in names_in(directory / inner))
    return names


def _has_size(path: Path, nbytes: int) -> bool:
    with storage_errors("look at", path):
        try:
            found = os.lstat(path)
        except NotADirectoryError:
            return False
        except OSError as error:
            if not is_gone(error):
                raise
        else:
            if stat.S_ISREG(found.st_mode) and found.st_size == nbytes:
                return True
    return _has_size_when_opened(path, nbytes)


def _has_size_when_opened(path: Path, nbytes: int) -> bool:
    # A node may remember a size, or that the name was absent; to open asks the server.
    try:
        with open_shard_file(path, nbytes=nbytes, direct=False):
            return True
    except IncompleteCheckpointError:
        return False
    except StorageError as error:
        if is_no_file(error):
            return False
        raise
