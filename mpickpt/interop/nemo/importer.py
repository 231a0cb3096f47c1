"""Imports distributed checkpoints of Megatron-core and NeMo; needs no torch."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpickpt.errors import IncompleteCheckpointError, ManifestError
from mpickpt.format.tree import DictNode, Node, Plain
from mpickpt.format.tree_json import encode_tree
from mpickpt.interop.dcp.importer import Gathering, about, read_listing, tensor_of
from mpickpt.interop.dcp.importing import kept, save_imported
from mpickpt.interop.dcp.items import read_value, unwrapped
from mpickpt.interop.dcp.metadata import METADATA_NAME, DcpListing
from mpickpt.interop.nemo.directory import (
    COMMON_NAME,
    find_checkpoint,
    iteration_of,
    read_digests,
)
from mpickpt.interop.nemo.names import COMMON, Naming
from mpickpt.interop.progress import Progress
from mpickpt.interop.sources.containment import nbytes_contained
from mpickpt.interop.sources.tree import SourceItem, SourceTree, grown
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.storage.places import PlaceLike

_ITERATION = "iteration"


def nemo(
    source: PlaceLike,
    destination: PlaceLike,
    *,
    iteration: int | None = None,
    step: int | None = None,
    comm: Any = None,
    options: SaveOptions | None = None,
    overwrite: bool = False,
    skip: Sequence[str] = (),
    progress: Progress | None = None,
) -> SaveResult:
    """Save a distributed checkpoint of Megatron-core or NeMo as one of ours.

    Parameters
    ----------
    source : path-like
        Directory with ``latest_checkpointed_iteration.txt``, one ``iter_…`` inside it,
        or the directory of a NeMo checkpoint, which has ``weights``.
    destination : path-like
        Directory of the new checkpoint.
    iteration : int, optional
        Which of the iterations in `source`; by default the latest.
    step : int, optional
        Step of the new checkpoint; by default the iteration.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that import; each reads a share of the items. Any number will do.
    options, overwrite
        As in `save_sharded`.
    skip : sequence of str
        Patterns of Megatron's own names ("optimizer.*", "rng_state/*", "common.pt") of
        what is left out.
    progress : callable, optional
        Gets (bytes just read, bytes of all that this rank reads).

    Returns
    -------
    SaveResult

    Raises
    ------
    CheckpointNotFoundError
        There is no such checkpoint.
    ManifestError, IncompleteCheckpointError, CorruptShardError, LayoutError
        As `dcp`. A checkpoint with ``integrity.json`` is compared with it as a whole.

    Notes
    -----
    Collective. Durable when it returns. Nothing of the source is executed; ``context``
    of NeMo is not looked at.

    The tree is ``{"model": {name: ...}, "master": {name: ...}, "optimizer": {"state":
    {name: {"exp_avg": ...}}}, "extra": {"common": ..., "objects": ...}}``. A prefix
    "model." or "module." that all weights have is left out of names. Layers that
    Megatron stacks stay stacked: an array has the shape that the checkpoint gives it;
    optimizer state that versions below 0.14 flattened has its true shape again.
    "common" is what Megatron keeps beside tensors, its arguments too; "objects" are its
    ShardedObjects, by name and shard. A distributed optimizer that was saved as one
    buffer for all weights is below "optimizer/buffers", as it is.
    """
    return save_imported(
        partial(_describe, iteration=iteration, skip=skip),
        source,
        destination,
        step=step,
        comm=comm,
        options=options,
        overwrite=overwrite,
        progress=progress,
    )


def _describe(source: Path, iteration: int | None, skip: Sequence[str]) -> SourceTree:
    directory = find_checkpoint(source, iteration)
    listing = read_listing(directory)
    names = kept(list(listing.paths), skip)
    naming = Naming.of(listing.tensors)
    gathering = Gathering(directory)
    for name in names:
        if name in listing.tensors:
            gathering.add_tensor(naming.tensor(name), tensor_of(listing, name))
        else:
            node, arrays = read_value(directory, listing.values[name], name)
            # Megatron saves the list of the objects that one rank has by that name.
            gathering.add_value(naming.value(name), unwrapped(node), arrays)
    if kept([COMMON_NAME], skip):
        _add_common(gathering, any(naming.value(n) == COMMON for n in listing.values))
    tree = grown(gathering.root, where=gathering.where)
    return SourceTree(
        directory=str(directory),
        document=encode_tree(tree),
        arrays=tuple(gathering.arrays),
        step=_step(tree, directory),
        about=about("Megatron-core torch_dist", listing, names),
        digests=_digests(directory, listing),
    )


def _add_common(gathering: Gathering, is_item: bool) -> None:
    """Add what Megatron keeps in a file beside the items, if not as one of them."""
    directory = gathering.directory
    if os.path.lexists(directory / COMMON_NAME):
        nbytes = nbytes_contained(directory, COMMON_NAME)
        item = SourceItem(COMMON_NAME, 0, nbytes)
        gathering.add_value(COMMON, *read_value(directory, item, "common"))
    elif not is_item:
        raise IncompleteCheckpointError(
            f"{directory} has no {COMMON_NAME}, which Megatron always writes; "
            f"skip=[{COMMON_NAME!r}] imports the rest",
            path=str(directory / COMMON_NAME),
        )


def _digests(directory: Path, listing: DcpListing) -> dict[str, tuple[int, str]]:
    digests = read_digests(directory)
    if digests is None:
        return {}
    chunks = (c for entry in listing.tensors.values() for c in entry.chunks)
    files = {METADATA_NAME, *(c.item.file for c in chunks)}
    files |= {item.file for item in listing.values.values()}
    missing = sorted(files - set(digests))
    if missing:
        raise ManifestError(
            f"{directory} has an integrity.json without {', '.join(missing[:4])}, of "
            "which the checkpoint is made"
        )
    return {
        name: (nbytes_contained(directory, name), digest)
        for name, digest in digests.items()
    }


def _step(tree: Node, directory: Path) -> int:
    node: Node | None = tree
    for name in (*COMMON, _ITERATION):
        node = dict(node.items).get(name) if isinstance(node, DictNode) else None
    if isinstance(node, Plain) and type(node.value) is int and node.value >= 0:
        return node.value
    return iteration_of(directory.name) or 0
