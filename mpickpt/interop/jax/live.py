"""A jax.Array as a live object: read at a save, replaced by a load; no files, no MPI.

Whose an array is, its sharding says. One that spans several processes is `Sharded`,
each process giving the boxes of its own devices; one that all processes hold whole, or
that this process has for itself, is `Replicated`, and so compared between the ranks.
"""

from collections.abc import Callable
from typing import Any

import jax

from mpickpt.errors import StateTypeError
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.interop.jax.arrays import (
    Form,
    elements_of,
    form_of,
    like_before,
    make_array,
    make_shared_out,
    own_elements,
)
from mpickpt.state import ArraySpec, AsSaved, PerRank, Replicated, Sharded

KEY_IMPL = "prng_impl"
KEY_DATA = "key_data"


class JaxArray:
    """A jax.Array that a save reads and a load replaces.

    Parameters
    ----------
    value : jax.Array or jax.ShapeDtypeStruct
        What the program has.
    name : str
        Its place in the tree, for messages.
    is_wrapped : bool
        A wrapper around it says whose it is.
    prefetch : callable
        Called before any array is read.

    Attributes
    ----------
    value : jax.Array or jax.ShapeDtypeStruct
        What the program had; after a load, what was loaded.
    """

    def __init__(
        self,
        value: Any,
        *,
        name: str,
        is_wrapped: bool,
        prefetch: Callable[[], None],
    ) -> None:
        self.value = value
        self._name = name
        self._is_wrapped = is_wrapped
        self._prefetch = prefetch

    def state_dict(self) -> Any:
        """Return the elements in host memory, in a wrapper that says whose they are.

        Raises
        ------
        StateTypeError
            There are no elements that could be saved.
        """
        form = self._form()
        if isinstance(self.value, jax.ShapeDtypeStruct):
            raise self._refused("is a jax.ShapeDtypeStruct, for `like` trees only")
        if self.value.is_deleted():
            raise self._refused(
                "was deleted or donated; save what the step returned in its place"
            )
        self._prefetch()
        if form.is_shared_out:
            return self._as_pieces(form, own_elements(self.value, form))
        return self._as_whole(form, elements_of(self.value))

    def state_dict_template(self) -> Any:
        """Return what to load, in arrays that the library allocates."""
        form = self._form()
        if form.is_shared_out:
            boxes = form.own_boxes()
            specs = {box: ArraySpec(box.shape, form.dtype) for box in boxes}
            return self._as_pieces(form, specs)
        return self._as_whole(form, ArraySpec(form.stored, form.dtype))

    def load_state_dict(self, state: Any) -> None:
        """Replace the value by a new array of the elements that were loaded.

        Raises
        ------
        StateTypeError
            No keys were saved, or those of another random generator.
        """
        form = self._form()
        if form.key_impl is not None:
            state = self._key_data(state, form.key_impl)
        if form.is_shared_out:
            loaded = make_shared_out(form, _boxes(state))
        else:
            is_bare = not isinstance(state, Sharded | Replicated | PerRank)
            loaded = make_array(form, state if is_bare else state.data)
        self.value = like_before(self.value, loaded)

    def _form(self) -> Form:
        try:
            form = form_of(self.value)
        except TypeError as error:
            raise self._refused(str(error)) from error
        if form.is_shared_out and self._is_wrapped:
            raise self._refused(
                "spans several processes, so its sharding says whose it is; leave the "
                "wrapper around it out"
            )
        return form

    def _key_data(self, state: Any, key_impl: str) -> Any:
        if not isinstance(state, dict) or state.get(KEY_IMPL) != key_impl:
            saved = state.get(KEY_IMPL) if isinstance(state, dict) else None
            found = f"keys for {saved!r}" if saved else "no typed keys"
            raise self._refused(
                f"saved were {found}, the program has keys for {key_impl!r}"
            )
        return state[KEY_DATA]

    def _refused(self, reason: str) -> StateTypeError:
        return StateTypeError(f"{self._name!r}: {reason}", key=self._name)

    def _as_pieces(self, form: Form, boxes: dict[Hyperslab, Any]) -> Any:
        pairs = [(box.offset, array) for box, array in boxes.items()]
        pieces = Sharded.pieces(pairs, global_shape=form.stored, dtype=form.dtype)
        return _with_impl(form, pieces)

    def _as_whole(self, form: Form, array: Any) -> Any:
        if not self._is_wrapped:
            # JAX keeps what spans processes equal; of the others it knows nothing.
            array = Replicated(array, check="full" if form.is_local else "rotate")
        return _with_impl(form, array)


class JaxNumber:
    """A number in a field of a node, which a jitted step turns into a 0-d array.

    A program that starts again has the number where the array was saved: it gets a
    number.

    Parameters
    ----------
    value : bool, int, float or complex
        What the program has.
    name : str
        Its place in the tree, for messages.

    Attributes
    ----------
    value : bool, int, float or complex
        What the program had; after a load, what was loaded.
    """

    def __init__(self, value: Any, name: str) -> None:
        self.value = value
        self._name = name

    def state_dict(self) -> Any:
        """Return the number."""
        return self.value

    def state_dict_template(self) -> Any:
        """Leave open whether a number was saved, or an array."""
        return AsSaved()

    def load_state_dict(self, state: Any) -> None:
        """Replace the value by the one that was loaded.

        Raises
        ------
        StateTypeError
            It is neither a number nor a 0-d array.
        """
        if isinstance(state, Sharded | Replicated | PerRank):
            state = state.data
        if getattr(state, "shape", None) == ():
            state = state.item()
        if not isinstance(state, bool | int | float | complex):
            raise StateTypeError(
                f"{self._name!r}: the program has the number {self.value!r}, but "
                f"saved was a {type(state).__qualname__}; make `like` the same",
                key=self._name,
            )
        self.value = state


def _with_impl(form: Form, content: Any) -> Any:
    if form.key_impl is None:
        return content
    return {KEY_IMPL: form.key_impl, KEY_DATA: content}


def _boxes(state: Any) -> dict[Hyperslab, Any]:
    pairs = state.boxes
    if pairs is None:
        pairs = ((state.offset, state.data),)
    return {Hyperslab(offset, tuple(array.shape)): array for offset, array in pairs}
