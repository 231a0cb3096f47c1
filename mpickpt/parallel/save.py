"""Saves a sharded state: the protocol, told as a story."""

import os
from pathlib import Path
from threading import Event
from typing import Any

from mpickpt.parallel.describe import memory_of
from mpickpt.parallel.logs import log_as_asked
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.parallel.pending_save import pending_of
from mpickpt.parallel.save_call import (
    SaveCall,
    conversations_of_save,
    place_and_options,
)
from mpickpt.parallel.save_steps import Save
from mpickpt.parallel.waiting import Steps, run
from mpickpt.storage.checkpoint_writer import write_shard_file
from mpickpt.storage.stream import ShardDigest


def save_sharded(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    step: int,
    comm: Any = None,
    metadata: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> SaveResult:
    """Save a state as one checkpoint.

    Parameters
    ----------
    tree : tree of dict, list, tuple
        The state; see `mpickpt.state`. It is not modified.
    path : path-like
        Directory of the checkpoint, on a file system that all ranks see.
    step : int
        Step number, from 0.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that save; None is this process alone, without MPI.
    metadata, metrics : dict, optional
        JSON values for the manifest; those of rank 0 are taken.
    overwrite : bool
        Replace a published checkpoint at `path`. The old one loads until the new one
        is published.
    options : SaveOptions, optional
        How to write.

    Returns
    -------
    SaveResult

    Raises
    ------
    StateTypeError
        A value that cannot be saved, or an array that does not say whose it is.
    LayoutError
        Boxes that leave a gap or overlap, shapes or dtypes that differ.
    ReplicaMismatchError
        A `Replicated` value that differs between ranks.
    CallMismatchError
        Ranks passed different arguments.
    CheckpointExistsError
        `path` holds a published checkpoint and `overwrite` is false.
    StorageError
        The file system refused on some rank.
    CollectiveTimeoutError
        Some rank did not arrive; `outcome` says whether the checkpoint can have
        been published.

    Notes
    -----
    Collective: every rank of `comm` calls it, and every rank raises the same error.
    Not thread-safe. Durable and whole on every rank when it returns. Waits for a save
    of `save_sharded_async` on the same `comm` that is still under way.
    """
    log_as_asked()
    directory, options, unusable = place_and_options(path, options)
    talks = conversations_of_save(comm, options)
    call = SaveCall(
        state=lambda: tree,
        directory=directory,
        step=step,
        metadata=metadata,
        metrics=metrics,
        overwrite=overwrite,
        options=options,
        comm=comm,
        unusable=unusable,
    )
    earlier = pending_of(talks)
    if earlier is not None:
        # Two saves at a time could be to one path, and each sweep what is the other's.
        earlier.finish()
    memory = memory_of(talks.memory, call.run_key)
    return run(save_at_once(Save(talks.save, memory, call)))


def save_at_once(save: Save) -> Steps[SaveResult]:
    """Save with the program waiting: the shard is streamed out of its own arrays."""
    drafted = yield from save.drafted()

    def write(path: Path, cancelled: Event) -> ShardDigest:
        return write_shard_file(path, drafted.draft, save.style, cancelled)

    return (yield from save.published(drafted, write))
