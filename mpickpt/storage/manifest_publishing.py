"""Publishes the manifest of a checkpoint, or takes it back; one process, no MPI."""

from dataclasses import dataclass
from pathlib import Path

from mpickpt.errors import StorageError
from mpickpt.format.naming import MANIFEST_NAME, MANIFEST_TMP_NAME
from mpickpt.storage.commit import (
    discard,
    publish,
    storage_errors,
    sync_directory,
    unlink_durably,
    write_new_file,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedManifest:
    """A manifest that lies durably beside the name that it is going to get.

    Attributes
    ----------
    directory : Path
        Of the checkpoint.
    content : bytes
        The manifest.
    before : bytes or None
        The manifest that has the name so far.
    """

    directory: Path
    content: bytes
    before: bytes | None


def publish_manifest(directory: Path, content: bytes) -> None:
    """Publish a checkpoint: give its directory a manifest, durably.

    Parameters
    ----------
    directory : Path
        Holds the shards, all of them durable.
    content : bytes
        The manifest.

    Raises
    ------
    StorageError
        The checkpoint is not published and the manifest of before, if there was
        one, is back; or, where the text says so, the outcome is unknown.

    Notes
    -----
    The rename is the commit point. What fails after it is undone durably, since
    the caller is going to report that the save failed.
    """
    publish_staged_manifest(stage_manifest(directory, content))


def stage_manifest(directory: Path, content: bytes) -> StagedManifest:
    """Make a manifest ready to be published; nothing is published yet."""
    final, tmp = directory / MANIFEST_NAME, directory / MANIFEST_TMP_NAME
    before = _content_of(final)
    sync_directory(directory)
    discard(tmp)
    write_new_file(tmp, content)
    return StagedManifest(directory=directory, content=content, before=before)


def publish_staged_manifest(staged: StagedManifest) -> None:
    """Publish a manifest that was made ready; otherwise as `publish_manifest`."""
    directory = staged.directory
    try:
        publish(directory / MANIFEST_TMP_NAME, directory / MANIFEST_NAME)
        sync_directory(directory.parent)
    except StorageError as failure:
        withdraw_manifest(staged, failure)
        raise


def withdraw_manifest(staged: StagedManifest, failure: StorageError) -> None:
    """Take a manifest back, published or not, because of a failure.

    Raises
    ------
    StorageError
        That failed too: whether the checkpoint is published is unknown.
    """
    directory = staged.directory
    final, tmp = directory / MANIFEST_NAME, directory / MANIFEST_TMP_NAME
    try:
        discard(tmp)
        if _content_of(final) != staged.content:
            return
        if staged.before is None:
            unlink_durably(final)
        else:
            write_new_file(tmp, staged.before)
            publish(tmp, final)
    except StorageError as error:
        message = (
            f"{failure.message}; taking it back failed too ({error.message}), "
            f"so whether {directory} is published is unknown"
        )
        raise StorageError(
            message, errno=failure.errno, path=failure.path, outcome="unknown"
        ) from error


def _content_of(path: Path) -> bytes | None:
    with storage_errors("read", path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
