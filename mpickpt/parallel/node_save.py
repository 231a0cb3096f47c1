"""Saves to the disks of the nodes; what a `LocalTier` stands for."""

import os
from dataclasses import replace
from pathlib import Path

from mpickpt.parallel.node_ground import NodeGround
from mpickpt.parallel.save_call import (
    SaveCall,
)


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
