"""Turns single tensors, and small trees of them, into what the core saves, and back."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mpickpt.errors import LayoutError
from mpickpt.interop.torch.dtensor import filled_boxes, is_dtensor, sharded_of
from mpickpt.interop.torch.staging import Moves
from mpickpt.interop.torch.tensors import Array, is_tensor, tensor_of
from mpickpt.state import PerRank, Replicated, Sharded

Wrap = Callable[[Array], Any]
Scalars = list[tuple[Any, Any]]

_MARK = "torch.Tensor"


def bare(array: Array) -> Array:
    """Leave an array as it is: a wrapper is around it already."""
    return array


def wrap_of(plain: str) -> Wrap:
    """Return the wrapper of tensors that are no DTensors.

    Parameters
    ----------
    plain : {"replicated", "per_rank"}
        Whose they are.
    """
    wraps: dict[str, Wrap] = {"replicated": Replicated, "per_rank": PerRank}
    return wraps[plain]


def wrapped_tensor(tensor: Any, name: str, wrap: Wrap, array_of: Any) -> Any:
    """Return a tensor as the core saves it: a DTensor as its boxes."""
    if is_dtensor(tensor):
        return sharded_of(tensor, name, lambda local: array_of(local, name))
    return wrap(array_of(tensor, name))


def unwrapped(value: Any) -> Any:
    """Return what is in a wrapper, of whatever kind it is."""
    if isinstance(value, Replicated | PerRank):
        return value.data
    if isinstance(value, Sharded) and value.boxes is None:
        return value.data
    return value


def fill(tensor: Any, saved: Any, name: str, moves: Moves) -> None:
    """Fill a tensor of the program with what was loaded.

    Raises
    ------
    LayoutError
        It does not fit: another shape, other boxes, or no array at all.
    """
    if is_dtensor(tensor):
        if not isinstance(saved, Sharded):
            raise LayoutError(
                f"{name!r} was saved as {_described(saved)}, the program has a DTensor",
                key=name,
            )
        for part, array in filled_boxes(tensor, saved, name):
            moves.put(part, array, name)
        return
    value = unwrapped(saved)
    if isinstance(value, int | float | complex | np.generic):
        value = np.asarray(value, _like(value, tensor))
    if not isinstance(value, np.ndarray):
        raise LayoutError(
            f"{name!r} was saved as {_described(saved)}, the program has a tensor",
            key=name,
        )
    moves.put(tensor, value, name)


def _like(value: Any, tensor: Any) -> Any:
    """Return the type for a number: its own, else one that the tensor converts."""
    if isinstance(value, np.generic):
        return value.dtype
    return None if tensor.dtype.is_floating_point or tensor.dtype.is_complex else "i8"


def _described(value: Any) -> str:
    if isinstance(value, dict | str | int | float | list):
        return f"{value!r:.80}"
    return f"a {type(value).__name__}"


def marked(value: Any, name: str, moves: Moves, wrap: Wrap = bare) -> Any:
    """Return a foreign object's state with its tensors as arrays that say so.

    A dict with one key of its own stands for each tensor, so that `unmarked` tells
    them from the arrays that the object has itself.
    """
    if is_tensor(value):
        return {_MARK: wrapped_tensor(value, name, wrap, moves.array_of)}
    if isinstance(value, dict):
        items = value.items()
        return {k: marked(v, f"{name}/{k}", moves, wrap) for k, v in items}
    if type(value) in (list, tuple):
        pairs = enumerate(value)
        return type(value)(marked(v, f"{name}/{i}", moves, wrap) for i, v in pairs)
    return value


def unmarked(value: Any) -> Any:
    """Return the state that `marked` was given, on the CPU."""
    if isinstance(value, dict) and list(value) == [_MARK]:
        return tensor_of(np.asarray(unwrapped(value[_MARK])))
    if isinstance(value, dict):
        return {key: unmarked(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(unmarked, value))
    return value


def rebuilt(value: Any, device: Any) -> Any:
    """Return a value of an optimizer's state of which the program has no like."""
    value = unwrapped(value)
    if isinstance(value, np.ndarray | np.generic):
        return torch.clone(tensor_of(np.array(value))).to(device)
    if isinstance(value, dict):
        return {key: rebuilt(child, device) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(rebuilt(child, device) for child in value)
    return value
