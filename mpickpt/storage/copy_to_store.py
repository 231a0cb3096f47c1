"""Copies the files of a checkpoint into an object store; one process, no MPI."""

import contextlib
import errno
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mpickpt.errors import CheckpointError, StorageError
from mpickpt.format.manifest import parse_manifest
from mpickpt.format.naming import (
    MANIFEST_NAME,
    copy_mark_name,
    is_own_file,
    receipts_name,
)
from mpickpt.format.records import ShardManifest
from mpickpt.storage.copy_target import (
    CopyControl,
    FileRecord,
    TierKind,
    files_of,
    mark_of,
)
from mpickpt.storage.copy_to_directory import DirectoryTarget
from mpickpt.storage.held_temporary import ABANDONED_S
from mpickpt.storage.places import Place
from mpickpt.storage.remote_path import RemotePath


class StoreTarget:
    """A directory of a store that one checkpoint is copied to; a `CopyTarget`."""

    kind: TierKind = "object"

    def __init__(self, directory: RemotePath) -> None:
        self._directory = directory
        self._store = directory.store

    def published(self) -> ShardManifest | None:
        """Return the manifest that is there."""
        content = self._content_of_manifest()
        where = str(self._directory / MANIFEST_NAME)
        return None if content is None else parse_manifest(content, where=where)

    def seems_published(self) -> bool:
        """Tell whether a manifest is there."""
        return self._store.stat(MANIFEST_NAME) is not None

    def begin(self, manifest: ShardManifest, source: Place) -> None:
        """Mark the directory, which need not be made."""
        mark = copy_mark_name(manifest.checkpoint_id)
        if self._store.stat(mark) is None:
            self._store.put(mark, mark_of(manifest, source))

    def is_whole(self, record: FileRecord) -> bool:
        """Tell whether a file is there, with its size and, if the store has it, digest.

        A name appears when all of the upload was verified.
        """
        found = self._store.stat(record.path)
        return (
            found is not None
            and found.nbytes == record.nbytes
            and found.sha256 in (None, record.sha256)
        )

    def missing_files(self, manifest: ShardManifest) -> list[str]:
        """Return the paths of the manifest's files that are not there, or not whole."""
        sizes = {file.name: file.nbytes for file in self._store.list()}
        files = files_of(manifest, range(manifest.world_size))
        return [file.path for file in files if sizes.get(file.path) != file.nbytes]

    def take(
        self,
        record: FileRecord,
        source: Place,
        control: CopyControl,
        *,
        replace: bool = False,
    ) -> None:
        """Copy a file; verified and durable under its name when it returns."""
        if replace:
            # A store takes no file again that it has with the right digest, as it says.
            self._store.delete([record.path])
        if isinstance(source, Path):
            self._upload(record, source, control)
            return
        with tempfile.TemporaryDirectory(prefix="mpickpt-") as folder:
            through = DirectoryTarget(Path(folder))
            only_stop = CopyControl(cancelled=control.cancelled)
            through.take(record, source, only_stop)
            self._upload(record, Path(folder), control)

    def publish(self, content: bytes) -> bool:
        """Put the manifest there; False if there is one already.

        Notes
        -----
        In a store that ignores conditions two may think that they have published;
        whoever does not find its own manifest afterwards has not.
        """
        if not self._store.put_new(MANIFEST_NAME, content):
            return False
        return self._store.check_conditions() or self._content_of_manifest() == content

    def withdraw(self, content: bytes) -> None:
        """Take this very manifest away again."""
        if self._content_of_manifest() == content:
            self._store.delete([MANIFEST_NAME])

    def confirm(self) -> None:
        """Do nothing: what a store shows is durable."""

    def tidy(self, manifest: ShardManifest) -> None:
        """Remove what copies left beside the published files, as well as can be."""
        files = files_of(manifest, range(manifest.world_size))
        kept = {MANIFEST_NAME, *(file.path for file in files)}
        kept.add(receipts_name(manifest.checkpoint_id))
        rubbish = [copy_mark_name(manifest.checkpoint_id)]
        with contextlib.suppress(CheckpointError):
            others = [file for file in self._store.list() if file.name not in kept]
            published = self._store.stat(MANIFEST_NAME)
            now_s = (published and published.modified_s) or 0.0
            rubbish += [
                file.name
                for file in others
                if is_own_file(file.name.rpartition("/")[2])
                and (file.modified_s or now_s) < now_s - ABANDONED_S
            ]
            self._store.delete(rubbish)
            self._store.abort_leftovers(older_than_s=ABANDONED_S)

    def _upload(self, record: FileRecord, source: Path, control: CopyControl) -> None:
        self._store.upload(
            record.path,
            source / record.path,
            nbytes=record.nbytes,
            sha256=record.sha256,
            pace=_Paced(control),
            cancelled=control.cancelled,
            progress=control.progress,
        )

    def _content_of_manifest(self) -> bytes | None:
        try:
            return self._store.read(MANIFEST_NAME)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            return None


@dataclass(frozen=True, slots=True)
class _Paced:
    """The pace of a copy, which does not outlast it."""

    control: CopyControl

    def take(self, nbytes: int) -> None:
        self.control.pace.take(nbytes, self.control.cancelled)
