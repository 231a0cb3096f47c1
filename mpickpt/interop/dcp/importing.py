"""Saves a checkpoint that another system wrote as one of ours: the story; collective.

Rank 0 reads what describes it and tells the others. Then every rank saves the state,
whose arrays are read from the source as the shards are written: memory stays flat, and
what is wrong with the source fails the save on all ranks before anything is published.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from mpickpt.errors import CorruptShardError
from mpickpt.interop.dcp.items import pieces_of
from mpickpt.interop.progress import Progress, watched
from mpickpt.interop.sources.containment import open_contained
from mpickpt.interop.sources.tree import SourceItem, SourceTree, share_out
from mpickpt.parallel.collective import Conversation, Steps, run
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.parallel.save import save_sharded
from mpickpt.parallel.save_call import conversations_of_save, place_and_options
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.places import PlaceLike, local_path

PHASE = "import"

_NO_STORE = "an import reads files; copy the checkpoint to a directory first"
_READ_NBYTES = 8 << 20


def save_imported(
    describe: Callable[[Path], SourceTree],
    source: PlaceLike,
    destination: PlaceLike,
    *,
    step: int | None,
    comm: Any,
    options: SaveOptions | None,
    overwrite: bool,
    progress: Progress | None = None,
) -> SaveResult:
    """Save what a foreign checkpoint holds.

    Parameters
    ----------
    describe : callable
        Returns the description of the checkpoint at a path; called on rank 0.
    source, destination : path-like
        The checkpoint, and the directory of ours.
    step : int or None
        Of ours; None takes the one that the source names.
    comm, options, overwrite
        As in `save_sharded`.
    progress : callable, optional
        Gets (bytes just read, bytes of all that this rank reads).

    Notes
    -----
    Collective. Durable when it returns.
    """
    path = Path(os.path.abspath(local_path(source, _NO_STORE)))
    _, usable, _ = place_and_options(destination, options)
    talk = conversations_of_save(comm, usable).save
    tree = SourceTree.parse(run(_described(talk, describe, path)))
    if tree.digests:
        run(talk.work(lambda stop: _verify(tree, talk, stop), PHASE))
    directory = Path(tree.directory)
    state = run(
        talk.agree(
            lambda: tree.state(
                talk.rank,
                talk.size,
                partial(pieces_of, directory),
            ),
            PHASE,
        )
    )
    return save_sharded(
        watched(state, progress),
        os.fspath(destination),  # type: ignore[arg-type]
        step=tree.step if step is None else step,
        comm=comm,
        metadata={"imported": tree.about | {"source": str(path)}},
        overwrite=overwrite,
        options=options,
    )


def kept(names: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Return the names that no pattern of `skip` matches."""
    patterns = (skip,) if isinstance(skip, str) else tuple(skip)
    return [n for n in names if not any(fnmatchcase(n, p) for p in patterns)]


def _described(
    talk: Conversation, describe: Callable[[Path], SourceTree], path: Path
) -> Steps[bytes]:
    # In a thread, for a large one takes a while and the others wait to hear.
    def look(_: Event) -> bytes:
        return describe(path).dump() if talk.rank == 0 else b""

    content = yield from talk.work(look, PHASE)
    return (yield from talk.bcast(content, PHASE))


def _verify(tree: SourceTree, talk: Conversation, stop: Event) -> None:
    """Compare this rank's share of the files with the digests of the source."""
    directory = Path(tree.directory)
    items = {SourceItem(name, 0, n): text for name, (n, text) in tree.digests.items()}
    for item, reader in share_out(items, talk.size).items():
        if reader == talk.rank and not stop.is_set():
            _verify_file(directory, item.file, items[item])


def _verify_file(directory: Path, name: str, expected: str) -> None:
    path = directory / name
    digest = hashlib.sha256()
    with (
        storage_errors("read", path),
        os.fdopen(open_contained(directory, name), "rb", buffering=0) as file,
    ):
        while block := file.read(_READ_NBYTES):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise CorruptShardError(
            f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, and the "
            f"checkpoint says {expected}; copy the file again from where it was saved",
            path=str(path),
            expected=expected,
            actual=digest.hexdigest(),
        )
