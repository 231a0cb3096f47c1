"""Gives the elements of a DCP plan's items, as late as memory asks for; no MPI."""

import math
from collections.abc import Callable
from threading import Lock
from typing import Any

import numpy as np
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from mpickpt.errors import LayoutError, StateTypeError
from mpickpt.interop.dcp_storage.values import (
    Stored,
    load_torch_saved,
    reason_of,
    stored,
    stored_bytes,
)
from mpickpt.interop.torch.tensors import array_of, numpy_dtype
from mpickpt.state import Shape, StreamedArray

Array = np.ndarray[Any, Any]
Box = tuple[Shape, Any]


def dtype_of(item: Any, key: str) -> np.dtype[Any]:
    """Return the element type that the plan promises for a tensor item."""
    try:
        return numpy_dtype(item.tensor_data.properties.dtype)
    except StateTypeError as error:
        raise StateTypeError(f"{key!r}: {error}", key=key) from error


def values_of(planner: Any) -> Callable[[Any, str], Stored]:
    """Return what gives the values of byte items.

    Parameters
    ----------
    planner : SavePlanner
        One that changes values gives bytes of torch.save, which are read back.

    Returns
    -------
    callable of (WriteItem, str)
        Takes an item and its key.
    """

    def direct(item: Any, key: str) -> Stored:
        return stored(planner.lookup_object(item.index), key)

    def through_bytes(item: Any, key: str) -> Stored:
        saved = planner.resolve_data(item).getvalue()
        try:
            value = load_torch_saved(saved)
        except Exception as error:
            raise StateTypeError(
                f"{key!r} is bytes of the planner that torch cannot read back without "
                f"running code: {reason_of(error)}",
                key=key,
            ) from error
        found = stored(value, key)
        return stored_bytes(saved, key) if found.is_torch_saved else found

    return direct if _resolves_to_state(planner) else through_bytes


class Arrays:
    """Gives the boxes of tensor items, as views where the state lies in memory.

    Parameters
    ----------
    planner : SavePlanner
        Gives the tensors.

    Notes
    -----
    What a planner converts, and what lies on a device, is resolved when it is written:
    one item at a time, so that the state never has a second copy in memory.
    """

    def __init__(self, planner: Any) -> None:
        self._planner = planner
        self._is_at_hand = _resolves_to_state(planner)
        self._latest = _Latest()

    def boxes(self, item: Any, key: str) -> list[Box]:
        """Return the box of an item, or none where it is empty."""
        chunk = item.tensor_data.chunk
        offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        if math.prod(shape) == 0:
            return []
        dtype = dtype_of(item, key)
        resolved = _Resolved(self._planner, item, key, shape, dtype, self._latest)
        if not self._is_at_hand:
            return [(offset, resolved)]
        tensor = self._planner.resolve_data(item)
        on_cpu = tensor.device.type == "cpu"
        return [(offset, resolved.checked(tensor) if on_cpu else resolved)]


class _Latest:
    """The item that was resolved last, and its array."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.owner: _Resolved | None = None
        self.array: Array | None = None


class _Resolved(StreamedArray):
    """An item that is resolved when its elements are written."""

    def __init__(
        self,
        planner: Any,
        item: Any,
        key: str,
        shape: Shape,
        dtype: np.dtype[Any],
        latest: _Latest,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._planner = planner
        self._item = item
        self._key = key
        self._latest = latest

    def read(self, box: tuple[slice, ...]) -> Array:
        """Return elements, of the item in memory that is one box away at most."""
        with self._latest.lock:
            if self._latest.owner is not self:
                self._latest.array = None
                tensor = self._planner.resolve_data(self._item).detach().cpu()
                self._latest.array = self.checked(tensor)
                self._latest.owner = self
            found: Array = self._latest.array[box]  # type: ignore[index]
            return found

    def checked(self, tensor: Any) -> Array:
        """Return the array of a tensor, which must be what the plan promises."""
        array = array_of(tensor, self._key)
        if (tuple(array.shape), array.dtype) != (self.shape, self.dtype):
            raise LayoutError(
                f"{self._key!r}: the plan promises {self.dtype} {self.shape}, the "
                f"planner gave {array.dtype} {tuple(array.shape)}; a planner that "
                "converts tensors must say so in the items of its plan",
                key=self._key,
            )
        return array


def _resolves_to_state(planner: Any) -> bool:
    """Tell whether a planner gives the tensors of the state themselves."""
    return all(
        getattr(type(planner), name, None) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "transform_object", "lookup_object")
    )
