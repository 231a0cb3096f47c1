"""Moves tensors between devices and host memory: one batch, one wait; no files, no MPI.

What lies in this process's memory is not moved: its arrays are views. For a device,
copies are begun on a stream of their own into pinned memory and waited for once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch

from mpickpt.errors import LayoutError
from mpickpt.interop.torch.tensors import (
    Array,
    array_of,
    require_savable,
    shares_memory,
    tensor_of,
)

_CHUNK_NBYTES = 64 << 20
_ALIGNMENT = 64


class Copier(Protocol):
    """Copies between one device and the host."""

    def allocate(self, nbytes: int) -> Any:
        """Return host memory, a tensor of uint8, that the device copies to and from."""

    def begin(self) -> None:
        """Let copies see what the program has computed until now."""

    def copy(self, target: Any, source: Any) -> None:
        """Begin to copy a tensor; it need not be done when this returns."""

    def finish(self) -> None:
        """Wait until all copies are done."""


class PinnedCopier:
    """Copies on a CUDA stream of its own.

    Notes
    -----
    The host memory comes from torch's cache of pinned blocks: what one save frees,
    the next one gets again. The program's stream goes on; whoever calls `finish`
    waits for the copies alone.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def allocate(self, nbytes: int) -> Any:
        """Return pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        """Make the copies come after what the program's stream has been given."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, target: Any, source: Any) -> None:
        """Begin to copy; the caching allocator learns that the stream uses both."""
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.device.type == "cuda":
                tensor.record_stream(self.stream)

    def finish(self) -> None:
        """Wait for the stream of the copies."""
        self.stream.synchronize()


class PlainCopier:
    """Copies to and from a device that has no streams which we know."""

    def allocate(self, nbytes: int) -> Any:
        """Return ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def begin(self) -> None:
        """Do nothing: each copy waits for the device."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy."""
        target.copy_(source)

    def finish(self) -> None:
        """Do nothing: all copies are done."""


PLAIN = PlainCopier()


@cache
def copier_of(device: Any) -> Copier | None:
    """Return what copies from a device; None where its memory is this process's."""
    if device.type == "cpu":
        return None
    return PinnedCopier(device) if device.type == "cuda" else PLAIN


class Moves:
    """The copies of one save or load.

    Parameters
    ----------
    copier : callable of torch.device, optional
        Gives the copier of each device.

    Notes
    -----
    A context manager, which waits when it is left, after an error too: memory that a
    copy still goes to must not be given to anybody else. Arrays on the way are whole
    from then on. Not thread-safe.
    """

    def __init__(self, copier: Callable[[Any], Copier | None] | None = None) -> None:
        self._copier_of = copier or copier_of
        self._begun: list[Copier] = []
        self._room: dict[Copier, Any] = {}

    def __enter__(self) -> "Moves":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def array_of(self, tensor: Any, name: str) -> Array:
        """Return a tensor as an array: a view, or a copy that was begun."""
        copier = self._copier_of(tensor.device)
        if copier is None:
            return array_of(tensor, name)
        array = self.empty_like(tensor, name)
        self._begin(copier)
        with torch.no_grad():
            copier.copy(tensor_of(array), tensor.resolve_conj().resolve_neg())
        return array

    def empty_like(self, tensor: Any, name: str) -> Array:
        """Return the array to load a tensor into: a view, or host memory."""
        copier = self._copier_of(tensor.device)
        if copier is None:
            return array_of(tensor, name)
        require_savable(tensor, name)
        content = self._allocate(copier, tensor.numel() * tensor.element_size())
        return array_of(content.view(tensor.dtype).view(tensor.shape), name)

    def put(self, tensor: Any, array: Array, name: str) -> None:
        """Fill a tensor with an array, if it is not the tensor's own memory.

        Raises
        ------
        LayoutError
            The shapes differ.
        """
        if shares_memory(tensor, array):
            return
        if tuple(tensor.shape) != array.shape:
            raise LayoutError(
                f"{name!r} was saved with shape {array.shape}, the program has "
                f"{tuple(tensor.shape)}; shapes do not change in a load",
                key=name,
            )
        copier = self._copier_of(tensor.device) or PLAIN
        self._begin(copier)
        with torch.no_grad():
            copier.copy(tensor.detach(), tensor_of(array))

    def finish(self) -> None:
        """Wait for all copies that were begun."""
        for copier in self._begun:
            copier.finish()
        self._begun.clear()
        self._room.clear()

    def _begin(self, copier: Copier) -> None:
        if copier not in self._begun:
            copier.begin()
            self._begun.append(copier)

    def _allocate(self, copier: Copier, nbytes: int) -> Any:
        """Return memory for one tensor, many small ones out of one block."""
        if nbytes > _CHUNK_NBYTES // 4:
            return copier.allocate(nbytes)
        room = self._room.get(copier)
        if room is None or room.numel() < nbytes:
            room = copier.allocate(_CHUNK_NBYTES)
        self._room[copier] = room[-(-nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return room[:nbytes]
