"""Saves to the disks of the nodes; what a `LocalTier` stands for."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpickpt.parallel.describe import memory_of
from mpickpt.parallel.node_ground import NodeGround
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.parallel.pending_save import pending_of
from mpickpt.parallel.save import save_at_once
from mpickpt.parallel.save_call import (
    SaveCall,
    conversations_of_save,
    place_and_options,
)
from mpickpt.parallel.save_steps import Save
from mpickpt.parallel.waiting import run


def on_nodes(
    call: SaveCall, template: str | os.PathLike[str], *, copies: int
) -> SaveCall:
    """Return a call that saves to the disks of the nodes instead.

    Parameters
    ----------
    call : SaveCall
        Its `directory` does not count.
    template : path-like
        The run directory; see `node_disk.own_directory`.
    copies : {0, 1}
        1 keeps each shard also on another node.

    Notes
    -----
    Local. What is wrong with the template on this rank is raised by the save, on all.
    """
    try:
        ground = NodeGround(template, call.step, copies=copies)
    except (TypeError, ValueError) as error:
        return replace(call, unusable=call.unusable or error)
    return replace(
        call, directory=ground.directory, ground=ground, run_name=Path(template)
    )


def save_on_nodes(
    tree: Any,
    template: str | os.PathLike[str],
    *,
    step: int,
    comm: Any = None,
    copies: int = 0,
    metadata: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> SaveResult:
    """Save a state as one checkpoint of a run on the disks of the nodes.

    Parameters
    ----------
    tree, step, comm, metadata, metrics, overwrite, options
        As in `save_sharded`.
    template, copies
        As in `LocalTier`.

    Returns
    -------
    SaveResult
        `path` is the directory on this rank's node.

    Raises
    ------
    ValueError
        A copy is wanted, and all ranks are on one node; or a variable in the template
        is not set on some rank.
    CheckpointError
        As `save_sharded`.

    Notes
    -----
    Collective; otherwise as `save_sharded`.
    """
    directory, options, unusable = place_and_options(os.sep, options)
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
    call = on_nodes(call, template, copies=copies)
    earlier = pending_of(talks)
    if earlier is not None:
        earlier.finish()
    memory = memory_of(talks.memory, call.run_key)
    return run(save_at_once(Save(talks.save, memory, call)))
