"""A small published checkpoint to be copied, and questions about its copies."""

import mpickpt
from mpickpt.errors import CheckpointError
from mpickpt.format.naming import copy_mark_name, is_own_file
from mpickpt.storage.copy_target import CopyControl, files_of
from mpickpt.storage.verification import verify_checkpoint

ALL = range(4)


def names_of(manifest, ranks=ALL):
    return [record.path for record in files_of(manifest, ranks)]


def own_names_in(directory):
    """Return what lies in a directory, the mark of a copy excepted."""
    mark = copy_mark_name("0" * 8)[:8]
    return sorted(p.name for p in directory.iterdir() if not p.name.startswith(mark))


def require_copy_of(source, target):
    """Check that a copy is whole, is the same checkpoint, and has nothing beside it."""
    original, copy = mpickpt.read_manifest(source), mpickpt.read_manifest(target)
    for name in ("checkpoint_id", "step", "shards", "arrays", "metadata", "layout"):
        assert getattr(copy, name) == getattr(original, name)
    report = verify_checkpoint(target)
    assert report.is_whole
    assert report.rubbish == ()


def require_unpublished(target):
    assert not (target / "manifest.json").exists()


def rubbish_in(target, manifest):
    named = {*names_of(manifest), "manifest.json", copy_mark_name(manifest.id8)}
    return [n for n in own_names_in(target) if n not in named and is_own_file(n)]


class BreaksOff:
    """A control whose progress raises after so many bytes, as an error half-way."""

    def __init__(self, nbytes, error=None):
        self._left = nbytes
        self._error = error or CheckpointError("enough")

    def control(self):
        return CopyControl(progress=self._progress)

    def _progress(self, nbytes):
        self._left -= nbytes
        if self._left < 0:
            raise self._error
