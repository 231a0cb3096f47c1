"""Opens one checkpoint for reading on one process: no MPI, no HDF5 library."""

import operator
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from mpickpt.errors import CheckpointError, ManifestError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.format.naming import Path as KeyPath
from mpickpt.format.naming import key_from_user, key_of, parse_key
from mpickpt.format.records import ArrayRecord, ShardManifest
from mpickpt.format.tree import Node, SavedLeaf, VariesNode
from mpickpt.planning.plain_values import is_by_rank, leaf_paths, plain_value
from mpickpt.planning.tree_walk import leaves
from mpickpt.storage.array_reader import Array, StoredArray
from mpickpt.storage.fresh_state import FreshState
from mpickpt.storage.per_rank_values import PerRankValues
from mpickpt.storage.places import Place, PlaceLike
from mpickpt.storage.remote_path import parse_place
from mpickpt.storage.saved_state import SavedState
from mpickpt.storage.selection import Selection

Key = str | int | tuple[str | int, ...]


def open_checkpoint(path: PlaceLike) -> "Checkpoint":
    """Open a checkpoint to look at its arrays and values.

    Parameters
    ----------
    path : path-like or URL
        Directory of one checkpoint, or its URL in a store.

    Returns
    -------
    Checkpoint
        A context manager.

    Raises
    ------
    CheckpointNotFoundError
        If no checkpoint was published there.
    ManifestError
        If its manifest is damaged.
    StorageError
        If the file system or the store refuses.

    Notes
    -----
    Not collective: needs no MPI and no HDF5. Whatever is read is verified first, by
    the CRC-32 of the blocks of 16 MiB that it lies in.

    Examples
    --------
    >>> with mpickpt.open_checkpoint("run/step-0000001234") as ckpt:  # doctest: +SKIP
    ...     rows = ckpt["model", "w"][0:128, :]
    ...     generator_of_rank_3 = ckpt.per_rank("rng")[3]
    """
    return Checkpoint(parse_place(path))


class Checkpoint:
    """A checkpoint that is open for reading; see `open_checkpoint`.

    A key is a path of components, ``ckpt["model", "w"]`` or ``ckpt["layers", 0]``, or
    one text that joins them with "/", ``ckpt["model/w"]``, escaped as `mpickpt show`
    prints it.

    Notes
    -----
    Not thread-safe. When another save replaces the checkpoint meanwhile, what is read
    from then on is the new one; `manifest` tells.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self._fresh = FreshState(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop what is kept in memory; no file stays open between reads anyway."""
        self._fresh.close()

    @property
    def manifest(self) -> ShardManifest:
        """The manifest."""
        return self._fresh.now.manifest

    def keys(self) -> list[str]:
        """Return the keys of all arrays and plain values, in the order of the tree.

        What `PerRank` holds is one key. Reads the indexes of all shards.
        """
        return self._fresh.attempt(_keys)

    def __contains__(self, key: Key) -> bool:
        path = _path_of(key)
        return self._fresh.attempt(lambda state: state.find(path) is not None)

    def __getitem__(self, key: Key) -> Any:
        """Return an array, read as it is indexed, or a plain value.

        Raises
        ------
        KeyError
            If there is no such key, or it is a subtree with arrays (use `load`), or
            each rank has a value of its own (use `per_rank`).
        """
        path = _path_of(key)
        return self._fresh.attempt(lambda state: self._item(state, path))

    def per_rank(self, key: Key) -> PerRankValues:
        """Return a sequence of what each saved rank had at a key.

        Parameters
        ----------
        key : str or tuple
            A value, an array, or a subtree.

        Returns
        -------
        PerRankValues
            Item r is read when it is asked for: plain values, containers, numpy
            arrays; of a sharded array the boxes of rank r; else `KeyError`.
        """
        path = _path_of(key)

        def read(rank: int) -> Any:
            return self._fresh.attempt(lambda state: state.value_of_rank(rank, path))

        return PerRankValues(key_of(path), self.manifest.world_size, read)

    def load(self, key: Key | None = None) -> Any:
        """Return everything below a key, as plain containers with numpy arrays.

        Parameters
        ----------
        key : str or tuple, optional
            By default, the whole state.

        Returns
        -------
        object
            Sharded and replicated arrays whole. What is `PerRank`, or differs between
            ranks, is a list over the ranks, with None for ranks that had nothing there.

        Raises
        ------
        KeyError
            If there is no such key.
        CorruptShardError, IncompleteCheckpointError, StorageError
            If the files are damaged.
        """
        path = () if key is None else _path_of(key)

        return self._fresh.attempt(
            lambda state: state.load(path, _node_at(state, path))
        )

    def read_into(self, key: Key, out: Array) -> None:
        """Fill an array, which may be a memory map, with a sharded or replicated one.

        Parameters
        ----------
        key : str or tuple
            Key of the array.
        out : ndarray
            Of its global shape and dtype. Undefined after an error.
        """
        name, saved = key_of(_path_of(key)), self[key]
        if not isinstance(saved, StoredArray) or saved.kind == "per_rank":
            raise KeyError(f"{name!r} is no sharded or replicated array")
        if (out.shape, out.dtype) != (saved.shape, saved.dtype):
            raise ValueError(f"{saved} does not fit into {out.dtype} {out.shape}")
        self._fresh.attempt(lambda state: state.fill(name, out))

    def pieces(self, keys: Sequence[Key]) -> Iterator[tuple[str, Hyperslab, Array]]:
        """Go through whole arrays, however large, with little memory.

        Parameters
        ----------
        keys : sequence of str or tuple
            Of sharded or replicated arrays; of a checkpoint of one rank, any array.

        Yields
        ------
        (str, Hyperslab, ndarray)
            Key, place in the array, and elements, verified; at most 16 MiB. Each shard
            is read once, in file order; a gap or an overlap is found at the end.
        """
        yield from self._fresh.now.pieces([key_of(_path_of(key)) for key in keys])

    def tree_of(self, rank: int) -> Node:
        """Return the tree that one rank saved."""
        return self._fresh.attempt(lambda state: state.tree_of(rank))

    def stored_boxes(self, key: Key) -> list[Hyperslab]:
        """Return the boxes in which a sharded or replicated array lies in the shards.

        To go through a large array box by box reads each shard once.
        """
        name = key_of(_path_of(key))
        return self._fresh.attempt(lambda state: state.stored_boxes(name))

    def _item(self, state: SavedState, path: KeyPath) -> Any:
        key = key_of(path)
        record = state.records.get(key)
        if record is not None:
            return self._array(state, record)
        node = _node_at(state, path)
        alone = state.manifest.world_size == 1
        if is_by_rank(node) and not alone:
            raise _differs(key)
        for leaf_key, leaf in leaves(node, key):
            if isinstance(leaf, VariesNode):
                raise _differs(leaf_key)
            if isinstance(leaf, SavedLeaf):
                raise KeyError(
                    f"{key!r} is a subtree that holds arrays, {leaf_key!r} among them; "
                    "index one of these, or take all with load()"
                )
        return plain_value(node, _no_array)

    def _array(self, state: SavedState, record: ArrayRecord) -> StoredArray:
        key, shape, dtype = record.key, record.global_shape, record.dtype
        if shape is None:
            if state.manifest.world_size > 1:
                raise _differs(key)
            own = state.shards.of(0).arrays[key]
            shape, dtype = own.shape, own.dtype

        def read(selection: Selection) -> Array:
            return self._fresh.attempt(lambda now: _read(now, record, selection))

        return StoredArray(key, record.kind, parse_dtype(dtype), shape, read)


def _path_of(key: Key) -> KeyPath:
    if not isinstance(key, str):
        components = key if isinstance(key, tuple) else (key,)
        return tuple(c if isinstance(c, str) else operator.index(c) for c in components)
    try:
        return parse_key(key_from_user(key))
    except ValueError as error:
        raise KeyError(str(error)) from error


def _keys(state: SavedState) -> list[str]:
    in_tree = map(key_of, leaf_paths(state.tree))
    # Below lists that differ between ranks, arrays are found by the manifest alone.
    arrays = (r.key for r in state.manifest.arrays if r.kind != "per_rank")
    return list(dict.fromkeys([*in_tree, *arrays]))


def _node_at(state: SavedState, path: KeyPath) -> Node:
    node = state.find(path)
    if node is None:
        raise KeyError(f"no {key_of(path)!r} in this checkpoint{_hint(state, path)}")
    return node


def _hint(state: SavedState, path: KeyPath) -> str:
    from difflib import get_close_matches

    close = get_close_matches(key_of(path), _keys(state), n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _read(state: SavedState, record: ArrayRecord, selection: Selection) -> Array:
    if state.records.get(record.key) != record:
        raise CheckpointError(
            f"{record.key!r} is another array since a save replaced the checkpoint; "
            "index the checkpoint again"
        )
    if record.kind == "per_rank":
        return state.read_own(0, record.key, selection)
    return state.read(record.key, selection)


def _differs(key: str) -> KeyError:
    return KeyError(
        f"each rank has a value of its own at {key!r}: use per_rank({key!r})[rank]"
    )


def _no_array(leaf: SavedLeaf) -> Any:
    raise ManifestError(f"the manifest does not list the array {leaf.key!r}")
