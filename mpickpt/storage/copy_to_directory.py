"""Copies the files of a checkpoint into a directory, durably; one process, no MPI."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from mpickpt.errors import CheckpointError, CheckpointNotFoundError, StorageError
from mpickpt.format.naming import (
    MANIFEST_NAME,
    copy_mark_name,
    parse_copy_mark_name,
    receipts_name,
)
from mpickpt.format.records import ShardManifest
from mpickpt.planning.blocks import usual_block_nbytes
from mpickpt.storage.catalog import missing_shards, read_manifest
from mpickpt.storage.checks import WholeFileSha256
from mpickpt.storage.commit import (
    close_file,
    discard,
    make_directory,
    publish,
    rename,
    storage_errors,
    sync_directory,
    sync_file,
    unlink_durably,
    write_new_file,
)
from mpickpt.storage.contents import own_files
from mpickpt.storage.copy_target import (
    CopyControl,
    FileRecord,
    TierKind,
    files_of,
    mark_of,
)
from mpickpt.storage.filesystem import file_system_of, wants_direct
from mpickpt.storage.held_temporary import (
    ABANDONED_S,
    HeldTemporary,
    discard_if_abandoned,
    held_temporary,
    is_temporary,
)
from mpickpt.storage.inflow import Inflow
from mpickpt.storage.places import Place, read_nbytes_at_once, reads_direct
from mpickpt.storage.ring import ring_of
from mpickpt.storage.second_look import is_gone
from mpickpt.storage.shard_file import ShardFile
from mpickpt.storage.small_file import is_there
from mpickpt.storage.stream import read_shard

_WRITES_IN_FLIGHT = 2
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class DirectoryTarget:
    """A directory that one checkpoint is copied to; a `CopyTarget`."""

    kind: TierKind = "directory"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifest_path = directory / MANIFEST_NAME

    def published(self) -> ShardManifest | None:
        """Return the manifest that is there."""
        try:
            return read_manifest(self._directory)
        except CheckpointNotFoundError:
            return None

    def seems_published(self) -> bool:
        """Tell whether this node sees a manifest; asks no server twice."""
        return _size_of(self._manifest_path) is not None

    def begin(self, manifest: ShardManifest, source: Place) -> None:
        """Make the directory and mark it."""
        make_directory(self._directory)
        mark = self._directory / copy_mark_name(manifest.checkpoint_id)
        if _size_of(mark) is not None:
            return
        try:
            write_new_file(mark, mark_of(manifest, source))
        except StorageError as error:
            if error.errno != errno.EEXIST:
                raise

    def is_whole(self, record: FileRecord) -> bool:
        """Tell whether a file is there: its name was given to whole ones alone."""
        return _size_of(self._directory / record.path) == record.nbytes

    def missing_files(self, manifest: ShardManifest) -> list[str]:
        """Return the paths of the manifest's files that are not there, or not whole."""
        missing = missing_shards(self._directory, manifest)
        layout = manifest.layout
        if layout is not None and not is_there(self._directory / layout.path):
            missing.append(layout.path)
        if missing:
            return missing
        files = files_of(manifest, range(manifest.world_size))
        return [record.path for record in files if not self.is_whole(record)]

    def take(
        self,
        record: FileRecord,
        source: Place,
        control: CopyControl,
        *,
        replace: bool = False,
    ) -> None:
        """Copy a file; verified and durable under its name when it returns."""
        final = self._directory / record.path
        block_nbytes = usual_block_nbytes(record.nbytes)
        if final.parent != self._directory:
            make_directory(final.parent)
        with held_temporary(final) as held:
            with (
                self._opened(held, record.nbytes) as file,
                ring_of(file.write_at, block_nbytes, _WRITES_IN_FLIGHT) as ring,
            ):
                inflow = Inflow(file, ring, block_nbytes, control)
                read_shard(
                    source / record.path,
                    nbytes=record.nbytes,
                    spans=[(0, record.nbytes)],
                    check=WholeFileSha256(record.sha256),
                    deliver=inflow.take,
                    direct=reads_direct(source / record.path, "auto"),
                    block_nbytes=max(block_nbytes, read_nbytes_at_once(source)),
                )
                inflow.finish()
                sync_file(held.descriptor, held.path)
            publish(held.path, final)

    def publish(self, content: bytes) -> bool:
        """Put the manifest there, durably; False if there is one already.

        Notes
        -----
        A hard link, unlike a rename, replaces nothing: of two that publish different
        checkpoints at once, one is told.
        """
        sync_directory(self._directory)
        with held_temporary(self._manifest_path) as held:
            with _closed(held):
                file = ShardFile(
                    held.descriptor, held.path, nbytes=len(content), direct=False
                )
                file.write_at(memoryview(content), 0)
                sync_file(held.descriptor, held.path)
            is_new = _name_if_free(held.path, self._manifest_path)
        self.confirm()
        return is_new

    def confirm(self) -> None:
        """Make durable what another process has published."""
        sync_directory(self._directory)
        sync_directory(self._directory.parent)

    def withdraw(self, content: bytes) -> None:
        """Take this very manifest away again."""
        with storage_errors("read", self._manifest_path):
            if self._manifest_path.read_bytes() != content:
                return
        unlink_durably(self._manifest_path)

    def tidy(self, manifest: ShardManifest) -> None:
        """Remove what copies left beside the published files, as well as can be.

        Notes
        -----
        Spared is what another copier is writing, and what is younger than what was
        published by less than ten minutes: who writes it is going to be told.
        """
        named = {f.path for f in files_of(manifest, range(manifest.world_size))}
        named.add(receipts_name(manifest.checkpoint_id))
        with contextlib.suppress(CheckpointError, OSError):
            now_s = os.lstat(self._manifest_path).st_mtime
            for path in own_files(self._directory):
                if str(path.relative_to(self._directory)) not in named:
                    _tidy_file(path, manifest, now_s)

    @contextlib.contextmanager
    def _opened(self, held: HeldTemporary, nbytes: int) -> Iterator[ShardFile]:
        with _closed(held):
            yield ShardFile(
                held.descriptor, held.path, nbytes=nbytes, direct=self._writes_direct
            )

    @cached_property
    def _writes_direct(self) -> bool:
        return wants_direct(file_system_of(self._directory), "auto")


@contextlib.contextmanager
def _closed(held: HeldTemporary) -> Iterator[None]:
    try:
        yield
    finally:
        close_file(held.descriptor, held.path)


def _name_if_free(tmp: Path, final: Path) -> bool:
    """Give a file a second name unless something has it; tell whether it got it."""
    with storage_errors(f"publish as {final.name}", tmp):
        try:
            os.link(tmp, final)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            return True
    # The file system has no hard links: a moment remains in which two may publish.
    if is_there(final):
        return False
    rename(tmp, final)
    return True


def _size_of(path: Path) -> int | None:
    """Return the size of a regular file; None where there is none."""
    with storage_errors("look at", path):
        try:
            found = os.lstat(path)
        except NotADirectoryError:
            return None
        except OSError as error:
            if not is_gone(error):
                raise
            return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _tidy_file(path: Path, manifest: ShardManifest, now_s: float) -> None:
    if is_temporary(path):
        discard_if_abandoned(path, now_s)
    elif (
        parse_copy_mark_name(path.name) == manifest.id8
        or os.lstat(path).st_mtime < now_s - ABANDONED_S
    ):
        discard(path)
