"""Turns pytrees of JAX into state trees, and what was loaded into pytrees again."""

import dataclasses
from typing import Any

import jax

from mpickpt.errors import StateTypeError
from mpickpt.interop.jax.arrays import is_jax_array
from mpickpt.interop.jax.live import JaxArray, JaxNumber
from mpickpt.state import PerRank, Replicated, Sharded

Wrapper = Sharded | Replicated | PerRank

_NUMBERS = (bool, int, float, complex)


def adapt(tree: Any) -> Any:
    """Return a state tree for a pytree, to be saved or to be the `like` of a load.

    Parameters
    ----------
    tree : pytree
        Of `jax.Array`, `jax.ShapeDtypeStruct` with a sharding (in a `like` only), and
        whatever else the library saves: plain values, wrapped arrays, live objects.

    Returns
    -------
    tree
        Dicts, lists and tuples as they are; every other node that is registered with
        `jax.tree_util` (namedtuples, flax's and equinox's classes) as the dict of its
        children. Each array of JAX is read when it is saved, and not before.

    Notes
    -----
    Local; copies nothing. An array that spans several processes is saved as the boxes
    that each process has, any other one as `Replicated`: equal on all ranks. One that
    lies on this process's devices alone is compared whole at each save, which takes
    time if it is large and equal by construction: ``Replicated(params)`` compares a
    part. What is each rank's own has to be wrapped, as in
    ``PerRank(key, on_resize="keep")``. Keys are paths: "opt/0/mu/w". Static fields of
    a node are not saved.
    """
    return _Adapting().node(tree, "", is_wrapped=False)


def restore(loaded: Any, like: Any) -> Any:
    """Return the pytree that was loaded.

    Parameters
    ----------
    loaded : tree
        What a load with ``like=adapt(like)`` returned, or the `state` of a
        `Restored` whose manager has such a state.
    like : pytree
        The same tree, or one of the same structure; nothing of it is changed.

    Returns
    -------
    pytree
        Of the structure of `like`. Its arrays are new, each with the sharding of the
        one in `like`, or bound to no device where that was not.

    Raises
    ------
    StateTypeError
        `loaded` does not come from a load with such a `like`.

    Notes
    -----
    Local; copies nothing: the load has made the arrays.
    """
    return _restored(loaded, like, "")


class _Adapting:
    def __init__(self) -> None:
        self.unread: list[JaxArray] = []

    def node(self, value: Any, name: str, *, is_wrapped: bool) -> Any:
        if is_jax_array(value):
            array = JaxArray(
                value, name=name, is_wrapped=is_wrapped, prefetch=self.prefetch
            )
            self.unread.append(array)
            return array
        if isinstance(value, Wrapper):
            inner = self.node(value.data, name, is_wrapped=True)
            return dataclasses.replace(value, data=inner)
        children = _children(value)
        if children is None:
            return value
        nodes = {
            key: self.node(child, _below(name, key), is_wrapped=is_wrapped)
            for key, child in children.items()
        }
        if type(value) in (list, tuple):
            return type(value)(nodes.values())
        if type(value) is dict:
            return nodes
        return {
            key: JaxNumber(child, _below(name, key)) if _is_number(child) else child
            for key, child in nodes.items()
        }

    def prefetch(self) -> None:
        """Let all devices copy at once, before the first array is waited for."""
        arrays = [array.value for array in self.unread]
        self.unread.clear()
        if jax.default_backend() == "cpu":
            return  # its arrays are read where they lie
        for value in arrays:
            if isinstance(value, jax.Array) and not value.is_deleted():
                value.copy_to_host_async()


def _restored(loaded: Any, like: Any, name: str) -> Any:
    if is_jax_array(like):
        if not isinstance(loaded, JaxArray):
            raise _unlike(name, "an array of JAX", loaded)
        if isinstance(loaded.value, jax.ShapeDtypeStruct):
            raise StateTypeError(
                f"{name!r} was not loaded, and `like` has only its shape", key=name
            )
        return loaded.value
    if isinstance(loaded, JaxNumber):
        return loaded.value
    if isinstance(like, Wrapper):
        if like.data is None:
            return loaded
        around = loaded if isinstance(loaded, Wrapper) else None
        inner = _restored(around.data if around else loaded, like.data, name)
        return dataclasses.replace(around or like, data=inner)
    children = _children(like)
    if children is None:
        return loaded
    return _restored_node(loaded, like, children, name)


def _restored_node(loaded: Any, like: Any, children: dict[Any, Any], name: str) -> Any:
    if type(like) is dict:
        if not isinstance(loaded, dict):
            return loaded  # plain values, which a load replaces by others
        return {
            key: _restored(value, children[key], _below(name, key))
            if key in children
            else value
            for key, value in loaded.items()
        }
    if type(like) in (list, tuple):
        if not isinstance(loaded, list | tuple) or len(loaded) != len(like):
            return loaded
        pairs = enumerate(zip(loaded, like, strict=True))
        return type(like)(_restored(a, b, _below(name, i)) for i, (a, b) in pairs)
    if not isinstance(loaded, dict) or set(loaded) != set(children):
        raise _unlike(name, f"a {type(like).__qualname__}", loaded)
    _, structure = _one_level(like)
    return jax.tree_util.tree_unflatten(
        structure,
        [
            _restored(loaded[key], child, _below(name, key))
            for key, child in children.items()
        ],
    )


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS


def _children(value: Any) -> dict[Any, Any] | None:
    """Return the children of a node by key, or None for a leaf."""
    if value is None:
        return None
    if type(value) is dict:
        return value  # in its own order, where JAX would sort
    if type(value) in (list, tuple):
        return dict(enumerate(value))
    pairs, _ = _one_level(value)
    if pairs and pairs[0][0] == ():
        return None
    keys = [_key(path[0]) for path, _ in pairs]
    if len(set(keys)) < len(keys):
        keys = list(range(len(keys)))
    return dict(zip(keys, (child for _, child in pairs), strict=True))


def _one_level(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(  # type: ignore[no-any-return]
        value, is_leaf=lambda node: node is not value
    )


def _key(entry: Any) -> str | int:
    """Return the name of a child; JAX has a class for each kind of it."""
    for attribute in ("name", "key", "idx"):
        key = getattr(entry, attribute, None)
        if isinstance(key, str | int):
            return key
    return str(entry)


def _below(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


def _unlike(name: str, wanted: str, loaded: Any) -> StateTypeError:
    return StateTypeError(
        f"{name or '%root'!r} is {wanted} in `like`, but what was loaded has a "
        f"{type(loaded).__qualname__} there; load with like=mpickpt.jax.adapt(like)",
        key=name,
    )
