"""Reads jax.Arrays as boxes and makes them of boxes; no files, no MPI."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpickpt.format.hyperslab import Hyperslab
from mpickpt.state import Shape

Array = np.ndarray[Any, Any]
Index = tuple[slice, ...]


def is_jax_array(value: Any) -> bool:
    """Tell whether a leaf of a pytree is an array of JAX, or describes one."""
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a load has to make: an array's shape, elements and place.

    Attributes
    ----------
    shape : tuple of int
        Shape of the jax.Array, (N_0, ..., N_{d-1}).
    stored : tuple of int
        Shape of what is stored: typed keys have axes of their own behind.
    dtype : numpy.dtype
        Element type of what is stored.
    element : dtype of JAX
        Element type of the jax.Array.
    sharding : jax.sharding.Sharding or None
        Where it lies; None for an array that is bound to no device.
    key_impl : str or None
        Name of the random generator, where the elements are typed keys.
    """

    shape: Shape
    stored: Shape
    dtype: Any
    element: Any
    sharding: Any
    key_impl: str | None

    @property
    def is_local(self) -> bool:
        """Whether the array lies on devices of this process alone."""
        return self.sharding is None or bool(self.sharding.is_fully_addressable)

    @property
    def is_shared_out(self) -> bool:
        """Whether no process alone can give the array, so that each gives boxes."""
        if self.is_local:
            return False
        holders = {device.process_index for device in self.sharding.device_set}
        is_everywhere = len(holders) == jax.process_count()
        return not (is_everywhere and self.sharding.is_fully_replicated)

    def box(self, index: Index) -> Hyperslab:
        """Return the box of what is stored for an index of the jax.Array."""
        n_own = len(self.shape)  # of a shard of keys the index may be longer
        bounds = [
            part.indices(n)[:2]
            for part, n in zip(index[:n_own], self.shape, strict=True)
        ]
        tail = self.stored[n_own:]
        return Hyperslab(
            tuple(start for start, _ in bounds) + (0,) * len(tail),
            tuple(stop - start for start, stop in bounds) + tail,
        )

    def own_boxes(self) -> list[Hyperslab]:
        """Return the boxes that devices of this process hold, each once."""
        indices = self.sharding.addressable_devices_indices_map(self.shape)
        return list(dict.fromkeys(self.box(index) for index in indices.values()))


def form_of(value: Any) -> Form:
    """Return the form of a jax.Array or jax.ShapeDtypeStruct.

    Raises
    ------
    TypeError
        A tracer, or elements that are neither numbers nor keys.
    """
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{value} is a tracer; adapt a state outside of jit and grad")
    shape = tuple(value.shape)
    tail: Shape = ()
    dtype, key_impl = value.dtype, None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        key = jnp.empty((), dtype)
        words = jax.random.key_data(key)
        key_impl = str(jax.random.key_impl(key))
        tail, dtype = tuple(words.shape), words.dtype
    elif jnp.issubdtype(dtype, jax.dtypes.extended):
        raise TypeError(f"elements of dtype {dtype} cannot be saved")
    return Form(
        shape=shape,
        stored=shape + tail,
        dtype=np.dtype(dtype),
        element=value.dtype,
        sharding=value.sharding if is_committed(value) else None,
        key_impl=key_impl,
    )


def is_committed(value: Any) -> bool:
    """Tell whether an array is bound to its devices; if not, it follows the others.

    A step counter that came back bound to one device could not be used with
    parameters on a mesh.
    """
    if isinstance(value, jax.ShapeDtypeStruct):
        return value.sharding is not None
    return bool(getattr(value, "committed", getattr(value, "_committed", True)))


def elements_of(value: Any) -> Array:
    """Return an array's elements in host memory; those of a CPU are not copied."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


def own_elements(value: Any, form: Form) -> dict[Hyperslab, Array]:
    """Return the boxes that devices of this process hold, each once."""
    boxes: dict[Hyperslab, Array] = {}
    for shard in value.addressable_shards:
        box = form.box(shard.index)
        if box not in boxes:
            boxes[box] = elements_of(shard.data)
    return boxes


def make_array(form: Form, elements: Array) -> Any:
    """Return a new jax.Array of all its elements."""
    if form.sharding is None:
        return _typed(form, jax.device_put(elements))
    shape = elements.shape[: len(form.shape)]  # a rank's own may have another one
    return jax.make_array_from_callback(
        shape, form.sharding, lambda index: _typed(form, elements[index])
    )


def make_shared_out(form: Form, boxes: Mapping[Hyperslab, Array]) -> Any:
    """Return a new jax.Array of the boxes that this process's devices hold."""
    # The type has to be told only where this process holds no part of the array.
    known = {} if boxes else {"dtype": form.element}
    return jax.make_array_from_callback(
        form.shape,
        form.sharding,
        lambda index: _typed(form, boxes[form.box(index)]),
        **known,
    )


def like_before(before: Any, loaded: Any) -> Any:
    """Return what was loaded, weakly typed where the array before it was.

    A weak type decides of which type a product is, and only an update keeps it.
    """
    is_weak = isinstance(before, jax.Array) and getattr(before, "weak_type", False)
    if not is_weak or before.shape != loaded.shape or before.is_deleted():
        return loaded
    return before.at[...].set(loaded)


def _typed(form: Form, elements: Any) -> Any:
    if form.key_impl is None:
        return elements
    return jax.random.wrap_key_data(elements, impl=form.key_impl)
