"""Puts live objects of ours in place of torch's in a state tree."""

from collections.abc import Iterator
from typing import Any

import torch

from mpickpt.interop.torch.dtensor import is_dtensor
from mpickpt.interop.torch.foreign import ForeignState, PiecesState, TensorState
from mpickpt.interop.torch.leaves import Wrap, bare, wrap_of
from mpickpt.interop.torch.module import ModuleState
from mpickpt.interop.torch.optimizer import OptimizerState
from mpickpt.interop.torch.random import GeneratorState, RandomState, Streams
from mpickpt.interop.torch.staging import copier_of
from mpickpt.interop.torch.tensors import (
    array_of,
    is_tensor,
    numpy_dtype,
    require_savable,
)
from mpickpt.planning.live import is_generator
from mpickpt.state import PerRank, Replicated, Sharded

_OURS = (type, ModuleState, OptimizerState, ForeignState, TensorState, PiecesState)
PLAIN = ("replicated", "per_rank")


def adapt(
    tree: Any,
    *,
    plain: str = "replicated",
    buffers: str | None = None,
) -> Any:
    """Return a state tree that the library can save and load, made of torch's objects.

    Parameters
    ----------
    tree : tree of dict, list, tuple
        May hold, beside what any state holds: modules, optimizers, DTensors,
        `torch.Generator`, `RandomState`, tensors in a `Sharded`, `Replicated` or
        `PerRank`, and objects with `state_dict` and `load_state_dict`, such as LR
        schedulers and data loaders, whose state may hold tensors.
    plain : {"replicated", "per_rank"}
        Whose those tensors of modules and optimizers are that are no DTensors: the
        same on all ranks, as under DistributedDataParallel, or each rank's own.
    buffers : {"replicated", "per_rank"}, optional
        The same for buffers alone, such as the statistics of batch normalisation,
        which DistributedDataParallel lets differ between ranks. On another number of
        ranks all take rank 0's. By default as `plain`.

    Returns
    -------
    tree
        For `save_sharded`, `save_sharded_async`, `CheckpointManager`, and as the
        `like` of `load_sharded`. Modules and optimizers are read when a save asks
        and filled by a load, so a tree may be adapted once.

    Raises
    ------
    StateTypeError
        A tensor that cannot be saved: on the meta device, sparse, quantized, nested,
        of a class of its own; a ZeroRedundancyOptimizer; DTensors with partial sums.
        Those of modules and optimizers are found at the save.

    Notes
    -----
    Not collective. Names of parameters are those without the prefixes of
    DistributedDataParallel, torch.compile, FSDP and activation checkpointing. A tied
    parameter is stored once. Tensors on the CPU are not copied: an asynchronous save
    copies them before it returns.
    """
    for name, choice in (("plain", plain), ("buffers", buffers or plain)):
        if choice not in PLAIN:
            raise ValueError(f"{name} is {choice!r}; expected one of {PLAIN}")
    modules = dict(_modules_in(tree, ""))
    buffer_wrap = wrap_of(plain) if buffers is None else _BUFFER_WRAPS[buffers]
    return _Walk(wrap_of(plain), buffer_wrap, modules).node(tree, "", None)


def _first_of_resized(array: Any) -> PerRank:
    return PerRank(array, on_resize="first")


_BUFFER_WRAPS: dict[str, Wrap] = {
    "replicated": Replicated,
    "per_rank": _first_of_resized,
}


class _Walk:
    """The walk over a tree; `scope` is the wrapper around a place, if there is one."""

    def __init__(self, wrap: Wrap, buffer_wrap: Wrap, modules: dict[str, Any]) -> None:
        self.wrap = wrap
        self.buffer_wrap = buffer_wrap
        self.modules = modules

    def node(self, value: Any, key: str, scope: Any) -> Any:
        """Return what stands in place of a value."""
        if isinstance(value, torch.nn.Module):
            wraps = (self.wrap, self.buffer_wrap)
            wraps = wraps if scope is None else (bare, bare)
            return ModuleState(value, key, *wraps)
        if isinstance(value, torch.optim.Optimizer):
            wrap = self.wrap if scope is None else bare
            return OptimizerState(value, key, self.modules, wrap)
        if is_tensor(value):
            return self.tensor(value, key)
        if isinstance(value, Sharded | Replicated | PerRank):
            return self.wrapped(value, key)
        if isinstance(value, torch.Generator | RandomState):
            return _random(value, scope)
        return self.container(value, key, scope)

    def container(self, value: Any, key: str, scope: Any) -> Any:
        """Return a container with what is in it changed, else what the core takes."""
        if isinstance(value, dict):
            items = value.items()
            return {k: self.node(v, _below(key, k), scope) for k, v in items}
        if isinstance(value, list | tuple):
            changed = [
                self.node(child, _below(key, i), scope) for i, child in enumerate(value)
            ]
            make = getattr(type(value), "_make", type(value))
            return make(changed)
        if _is_foreign(value):
            return ForeignState(value, key)
        return value

    def tensor(self, tensor: Any, key: str) -> Any:
        """Return a tensor as an array if it can be one, else as a live object."""
        if is_dtensor(tensor):
            return TensorState(tensor, key)
        require_savable(tensor, key)
        is_here = copier_of(tensor.device) is None
        return array_of(tensor, key) if is_here else TensorState(tensor, key)

    def wrapped(self, value: Any, key: str) -> Any:
        """Return a wrapper with what is in it changed."""
        if isinstance(value, Replicated):
            return Replicated(self.node(value.data, key, value), value.check)
        if isinstance(value, PerRank):
            return PerRank(self.node(value.data, key, value), value.on_resize)
        dtype = value.dtype
        if isinstance(dtype, torch.dtype):
            dtype = numpy_dtype(dtype)
        if value.boxes is None:
            data = self.node(value.data, key, value)
            shape, offset = value.global_shape, value.offset
            return Sharded(data, shape, offset, None, dtype, value.consecutive)
        return self.pieces(value, key, dtype)

    def pieces(self, value: Sharded, key: str, dtype: Any) -> Any:
        """Return several boxes with arrays for tensors."""
        boxes = value.boxes or ()
        shape = value.global_shape or ()
        if any(is_tensor(t) and copier_of(t.device) is not None for _, t in boxes):
            tensors = Sharded.pieces(boxes, global_shape=shape, dtype=dtype)
            return PiecesState(tensors, key)
        arrays = [(o, array_of(t, key) if is_tensor(t) else t) for o, t in boxes]
        return Sharded.pieces(arrays, global_shape=shape, dtype=dtype)


def _random(value: Any, scope: Any) -> Any:
    """Return random generators as this rank's own, if no wrapper says so already."""
    is_all = isinstance(value, RandomState)
    live = Streams() if is_all else GeneratorState(value)
    if scope is not None:
        return live
    return PerRank(live, value.on_resize if is_all else "error")


def _is_foreign(value: Any) -> bool:
    """Tell whether a value is somebody else's live object."""
    if isinstance(value, _OURS) or is_generator(value):
        return False
    return all(
        callable(getattr(value, name, None))
        for name in ("state_dict", "load_state_dict")
    )


def _modules_in(tree: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a tree with their keys."""
    if isinstance(tree, torch.nn.Module):
        yield key, tree
    elif isinstance(tree, dict):
        for name, child in tree.items():
            yield from _modules_in(child, _below(key, name))
    elif isinstance(tree, list | tuple):
        for number, child in enumerate(tree):
            yield from _modules_in(child, _below(key, number))
    elif isinstance(tree, Replicated | PerRank):
        yield from _modules_in(tree.data, key)


def _below(key: str, name: Any) -> str:
    return f"{key}/{name}" if key else str(name)
