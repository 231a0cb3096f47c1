"""Turns the values of DCP's byte items into nodes of a tree, and back.

Plain Python values are kept as such, and numpy arrays as arrays, so that everything
reads them. The rest is kept as what torch.save makes of it, if torch reads that back
with ``weights_only=True``: nothing is ever unpickled that could run code.
"""

import io
from typing import Any

import msgspec
import numpy as np
import torch

from mpickpt.errors import StateTypeError
from mpickpt.format.dtypes import check_dtype, dtype_name
from mpickpt.format.tree import MAX_DEPTH, ArrayNode, Node, SavedLeaf
from mpickpt.planning.flatten import flatten
from mpickpt.planning.merge import pack_tree
from mpickpt.planning.tree_walk import transform

Array = np.ndarray[Any, Any]

# Plain values stand in the index of every shard; what is larger is stored once.
MOST_PLAIN_NBYTES = 256 << 10

_REFUSAL = "WeightsUnpickler error: "
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class Stored(msgspec.Struct, frozen=True):
    """A value as it is stored.

    Attributes
    ----------
    node : Node
        Its arrays are `SavedLeaf`.
    arrays : dict of str to ndarray
        The arrays, by key.
    is_torch_saved : bool
        The node is one array with the bytes of torch.save.
    """

    node: Node
    arrays: dict[str, Array]
    is_torch_saved: bool = False


def stored(value: Any, key: str) -> Stored:
    """Return how a value is stored under a key.

    Raises
    ------
    StateTypeError
        torch.load would have to run code to read it back.
    """
    if _is_plain(value):
        plain = _as_plain(value, key)
        if plain.arrays or len(pack_tree(plain.node)) <= MOST_PLAIN_NBYTES:
            return plain
    saved = torch_saved(value, key)
    try:
        load_torch_saved(saved)
    except Exception as error:
        raise StateTypeError(
            f"{key!r} is a {type(value).__module__}.{type(value).__qualname__}, which "
            f"torch cannot read back without running code: {reason_of(error)}. Store "
            "plain values, tensors and numpy arrays, or allow its class with "
            "torch.serialization.add_safe_globals, in programs that load it too",
            key=key,
        ) from error
    return stored_bytes(saved, key)


def stored_bytes(saved: bytes, key: str) -> Stored:
    """Return how the bytes of torch.save are stored under a key."""
    array = np.frombuffer(saved, np.uint8)
    return Stored(_leaf(key, array), {key: array}, is_torch_saved=True)


def torch_saved(value: Any, key: str) -> bytes:
    """Return the bytes that torch.save makes of a value."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickling runs the program's own code
        raise StateTypeError(
            f"{key!r} is a {type(value).__qualname__}, which torch.save refuses: "
            f"{reason_of(error)}",
            key=key,
        ) from error
    return buffer.getvalue()


def load_torch_saved(saved: bytes) -> Any:
    """Return the value of the bytes of torch.save; never runs code of theirs."""
    return torch.load(io.BytesIO(saved), weights_only=True)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Tell whether a value comes back as exactly what it was, types included."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _is_known(value.dtype)
    if depth > MAX_DEPTH // 2:
        return False
    if kind is dict:
        keys_are_plain = all(type(key) in (str, int) for key in value)
        return keys_are_plain and all(_is_plain(v, depth + 1) for v in value.values())
    return kind in (list, tuple) and all(_is_plain(v, depth + 1) for v in value)


def _is_known(dtype: np.dtype[Any]) -> bool:
    try:
        check_dtype(dtype)
    except TypeError:
        return False
    return True


def _as_plain(value: Any, key: str) -> Stored:
    flat = flatten(value, alone=True)
    arrays = {}
    renamed = []
    for leaf in flat.leaves:
        is_root = isinstance(flat.tree, ArrayNode)
        renamed.append(key if is_root else f"{key}/{leaf.key}")
        arrays[renamed[-1]] = leaf.boxes[0][1]

    def saved_leaf(node: Node) -> Node:
        if not isinstance(node, ArrayNode):
            return node
        return _leaf(renamed[node.ordinal], arrays[renamed[node.ordinal]])

    return Stored(transform(flat.tree, saved_leaf), arrays)


def _leaf(key: str, array: Array) -> SavedLeaf:
    return SavedLeaf(key, "sharded", dtype_name(array.dtype), tuple(array.shape))


def reason_of(error: BaseException) -> str:
    """Return the line of an error of torch that says what it refuses."""
    text = str(error)
    text = text[max(0, text.find(_REFUSAL)) :]
    return text.strip().partition("\n")[0][:300]
