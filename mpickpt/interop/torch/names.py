"""Names the tensors of a module as they are called without its wrappers."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from mpickpt.errors import StateTypeError
from mpickpt.interop.torch.dtensor import is_dtensor, local_of

# Segments that torch.compile, activation checkpointing and FSDP put into names.
_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_HOLDERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def entries_of(module: Any) -> list[tuple[str, str, Any]]:
    """Return what a module's state dict holds.

    Returns
    -------
    list of (str, str, object)
        Name without wrappers, name in the state dict, and the value: parameters and
        buffers themselves, and what extra state and hooks add.

    Raises
    ------
    StateTypeError
        Two values of one name, or a wrapper that hides the parameters.
    """
    _require_open(module)
    short = _shortening(module)
    entries = [
        (short(raw), raw, value)
        for raw, value in module.state_dict(keep_vars=True).items()
    ]
    if len({name for name, _, _ in entries}) != len(entries):
        names = [name for name, _, _ in entries]
        twice = next(name for name in names if names.count(name) > 1)
        raise StateTypeError(
            f"two tensors of the module are both called {twice!r} without the names "
            "of its wrappers; rename one of the attributes",
            key=twice,
        )
    return entries


def parameter_names(module: Any) -> dict[int, str]:
    """Return the name of each parameter, by its identity.

    A parameter that stands in several places has the first of its names.
    """
    names: dict[int, str] = {}
    for name, _, value in entries_of(module):
        if isinstance(value, torch.nn.Parameter):
            names.setdefault(id(value), name)
    short = _shortening(module)
    for raw, parameter in module.named_parameters():
        names.setdefault(id(parameter), short(raw))
    return names


def own_tensors(module: Any) -> set[int]:
    """Return the identities of a module's parameters and buffers."""
    return {id(tensor) for tensor in chain(module.parameters(), module.buffers())}


def ties_of(entries: list[tuple[str, str, Any]]) -> dict[str, str]:
    """Return, for each tensor that shares all its elements, where they are first."""
    first: dict[Any, str] = {}
    ties = {}
    for name, _, value in entries:
        place = _place_of(value)
        if place is None:
            continue
        owner = first.setdefault(place, name)
        if owner != name:
            ties[name] = owner
    return ties


def _place_of(value: Any) -> Any:
    """Return what tells whether two tensors are one in memory."""
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return None
    layout = (value.dtype, tuple(value.shape))
    local = local_of(value) if is_dtensor(value) else value
    if local.layout != torch.strided or local.device.type == "meta":
        return None
    if local.numel() == 0:
        return id(value)
    return (*layout, local.device, local.data_ptr(), local.stride())


def _require_open(module: Any) -> None:
    for name, child in module.named_modules():
        if any(c.__name__ == "FullyShardedDataParallel" for c in type(child).mro()):
            raise StateTypeError(
                f"{name or 'the module'!r} is wrapped by FullyShardedDataParallel, "
                "whose flat parameters have no places of their own; use "
                "torch.distributed.fsdp.fully_shard",
                key=name,
            )


def _shortening(module: Any) -> Any:
    """Return the function that takes the wrappers out of a name."""
    held = set(_holder_prefixes(module))

    def short(raw: str) -> str:
        parts = raw.split(".")
        kept = [
            part
            for i, part in enumerate(parts)
            if part not in _SEGMENTS and ".".join(parts[: i + 1]) not in held
        ]
        return ".".join(kept)

    def shortened(raw: str) -> str:
        plain = not held and not any(segment in raw for segment in _SEGMENTS)
        return raw if plain else short(raw)

    return shortened


def _holder_prefixes(module: Any) -> Iterator[str]:
    """Yield, for each wrapper with an attribute `module`, its name and that."""
    for name, child in module.named_modules():
        if isinstance(child, _HOLDERS):
            yield f"{name}.module" if name else "module"
