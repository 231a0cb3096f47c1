"""Imports checkpoints of `torch.distributed.checkpoint`; needs no torch."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpickpt.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    ManifestError,
)
from mpickpt.format.tree import ArrayNode, Node
from mpickpt.format.tree_json import encode_tree
from mpickpt.interop.dcp.flattened import unflattened
from mpickpt.interop.dcp.importing import kept, save_imported
from mpickpt.interop.dcp.items import read_value
from mpickpt.interop.dcp.metadata import (
    METADATA_NAME,
    MOST_NBYTES,
    DcpListing,
    parse_metadata,
)
from mpickpt.interop.progress import Progress
from mpickpt.interop.sources.containment import (
    names_inside,
    nbytes_contained,
    read_contained,
)
from mpickpt.interop.sources.tree import (
    Branch,
    SourceArray,
    SourceItem,
    SourceTree,
    grown,
    numbered,
    plant,
    step_in,
)
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.storage.places import PlaceLike

_STEP_NAMES = ("step", "iteration", "global_step")


def dcp(
    source: PlaceLike,
    destination: PlaceLike,
    *,
    step: int | None = None,
    comm: Any = None,
    options: SaveOptions | None = None,
    overwrite: bool = False,
    skip: Sequence[str] = (),
    progress: Progress | None = None,
) -> SaveResult:
    """Save a checkpoint of `torch.distributed.checkpoint` as one of ours.

    Parameters
    ----------
    source : path-like
        Directory with a ``.metadata``, as DCP's `FileSystemWriter` leaves it.
    destination : path-like
        Directory of the new checkpoint.
    step : int, optional
        Its step; by default the entry "step", "iteration" or "global_step" of the
        state, else 0.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks that import; each reads a share of the items. Any number will do.
    options, overwrite
        As in `save_sharded`.
    skip : sequence of str
        Patterns of DCP's own names ("optim.*") of what is left out.
    progress : callable, optional
        Gets (bytes just read, bytes of all that this rank reads).

    Returns
    -------
    SaveResult

    Raises
    ------
    ManifestError
        The source is damaged, has a version or a form that is not known, names files
        outside of itself, or holds a pickle that asks for more than data.
    IncompleteCheckpointError
        A file of it is missing or too short.
    CorruptShardError
        An item of it does not have the checksum that was saved with it.
    LayoutError
        Its chunks leave a gap or overlap.

    Notes
    -----
    Collective. Durable when it returns. Nothing of the source is executed.

    The tree is the one that was saved, by the paths that DCP keeps, with its own
    names; "optim" is called "optimizer" where it is a dict of "state" and
    "param_groups", as `get_state_dict` gives it, so that it fits
    `mpickpt.torch.adapt({"model": ..., "optimizer": ...})`. Tensors are sharded arrays
    of any number of ranks, also those that an object held; objects are imported where
    they are made of plain values and arrays, others are an error that names them.
    """
    return save_imported(
        partial(_describe, skip=skip),
        source,
        destination,
        step=step,
        comm=comm,
        options=options,
        overwrite=overwrite,
        progress=progress,
    )


def read_listing(directory: Path) -> DcpListing:
    """Return what a DCP checkpoint lists, whose files are all there and long enough.

    Raises
    ------
    CheckpointNotFoundError, IncompleteCheckpointError, ManifestError
        If there is none, or part of it is missing.
    """
    _require_metadata(directory)
    content = read_contained(directory, METADATA_NAME, MOST_NBYTES)
    listing = parse_metadata(content, where=str(directory / METADATA_NAME))
    _require_files(directory, listing)
    return listing


class Gathering:
    """Collects the nodes of a tree and the arrays that they refer to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.where = str(directory)
        self.root: Branch = {}
        self.arrays: list[SourceArray] = []

    def add_tensor(self, path: tuple[Any, ...], array: SourceArray) -> None:
        """Put an array in its place."""
        plant(self.root, path, ArrayNode(len(self.arrays)), where=self.where)
        self.arrays.append(array)

    def add_value(
        self, path: tuple[Any, ...], node: Node, arrays: list[SourceArray]
    ) -> None:
        """Put nodes with arrays of their own in their place."""
        plant(self.root, path, numbered(node, len(self.arrays)), where=self.where)
        self.arrays += arrays


def tensor_of(listing: DcpListing, name: str) -> SourceArray:
    """Return a tensor of the checkpoint as an array of ours."""
    entry = listing.tensors[name]
    array = SourceArray(name, entry.dtype, entry.shape, entry.chunks)
    if name not in listing.reshaped:
        return array
    return unflattened(array, listing.reshaped[name])


def _describe(directory: Path, skip: Sequence[str]) -> SourceTree:
    listing = read_listing(directory)
    names = kept(list(listing.paths), skip)
    gathering = Gathering(directory)
    for name in names:
        path = listing.paths[name]
        if name in listing.tensors:
            gathering.add_tensor(path, tensor_of(listing, name))
        else:
            node, arrays = read_value(directory, listing.values[name], name)
            gathering.add_value(path, node, arrays)
    root = _with_our_names(gathering.root)
    tree = grown(root, where=gathering.where)
    return SourceTree(
        directory=str(directory),
        document=encode_tree(tree),
        arrays=tuple(gathering.arrays),
        step=step_in(root, _STEP_NAMES),
        about=about("torch DCP 1.0.0", listing, names),
    )


def about(kind: str, listing: DcpListing, names: list[str]) -> dict[str, Any]:
    """Return what the manifest says of where the checkpoint came from."""
    skipped = sorted(set(listing.paths) - set(names))
    return {"from": kind} | ({"skipped": skipped} if skipped else {})


def _with_our_names(root: Branch) -> Branch:
    optim = root.get("optim")
    is_full = (
        "optimizer" not in root
        and isinstance(optim, dict)
        and {"state", "param_groups"} >= set(optim) >= {"state"}
    )
    if not is_full:
        return root
    return {"optimizer" if key == "optim" else key: v for key, v in root.items()}


def _require_metadata(directory: Path) -> None:
    names = names_inside(directory)
    if METADATA_NAME in names:
        return
    if f"{METADATA_NAME}.tmp" in names:
        raise IncompleteCheckpointError(
            f"{directory} has a {METADATA_NAME}.tmp and no {METADATA_NAME}: the save "
            "was not finished",
            path=str(directory / METADATA_NAME),
        )
    if any(name.startswith("__") and name.endswith(METADATA_NAME) for name in names):
        raise ManifestError(
            f"{directory} was saved with use_collectives=False: each rank's metadata "
            "stands alone, and what is sharded cannot be put together from it"
        )
    if any(name.endswith(".safetensors") for name in names):
        raise ManifestError(
            f"{directory} holds safetensors, which DCP's HuggingFaceStorageWriter "
            "wrote; only what its FileSystemWriter wrote is imported"
        )
    raise CheckpointNotFoundError(
        f"{directory} has no {METADATA_NAME}: no DCP checkpoint"
    )


def _require_files(directory: Path, listing: DcpListing) -> None:
    items: dict[str, list[SourceItem]] = {}
    chunks = (c for entry in listing.tensors.values() for c in entry.chunks)
    for item in [*(c.item for c in chunks), *listing.values.values()]:
        items.setdefault(item.file, []).append(item)
    for file, inside in items.items():
        nbytes, stop = nbytes_contained(directory, file), 0
        for item in sorted(inside, key=lambda item: item.start):
            if item.start < stop:
                raise ManifestError(
                    f"{directory / METADATA_NAME} has items of {file} that overlap"
                )
            stop = item.start + item.nbytes
        if stop > nbytes:
            raise IncompleteCheckpointError(
                f"{directory / file} has {nbytes} bytes, and its items need {stop}; "
                "the file was cut off",
                path=str(directory / file),
                expected=stop,
                actual=nbytes,
            )
