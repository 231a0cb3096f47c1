"""Remembers the manifests of a run between two looks; reads files only."""

import os
from collections.abc import Collection
from pathlib import Path

from mpickpt.errors import CheckpointError, CheckpointNotFoundError
from mpickpt.format.naming import MANIFEST_NAME
from mpickpt.format.records import ShardManifest
from mpickpt.storage.catalog import read_manifest

Signature = tuple[int, int, int]

_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ManifestCache:
    """Manifests that were read and whose files are still the same.

    A large one takes a second to parse, and retention asks for all at every save.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Signature, ShardManifest]] = {}

    def look_up(self, directory: Path) -> tuple[ShardManifest | None, str | None]:
        """Return a checkpoint's manifest and what is wrong with it.

        One of them is None; both where no manifest is there.
        """
        signature = _signature(directory / MANIFEST_NAME)
        known = self._known.pop(directory, None)
        try:
            if known is None or known[0] != signature:
                manifest = read_manifest(directory)
            else:
                manifest = known[1]
        except CheckpointNotFoundError:
            return None, None
        except CheckpointError as error:
            return None, str(error)
        if signature is not None:
            self._known[directory] = signature, manifest
        return manifest, None

    def forget_others(self, directories: Collection[Path]) -> None:
        """Forget all manifests but those of the directories that are still there."""
        for directory in self._known.keys() - set(directories):
            self._known.pop(directory, None)


def _signature(path: Path) -> Signature | None:
    # Opened, since a node may remember how a name was; to open asks the server.
    try:
        descriptor = os.open(path, _LOOK)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
