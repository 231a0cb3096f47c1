"""Stands in for the classes of frameworks in what they have pickled; touches nothing.

A stub holds plain values and has no behaviour. Only a subclass of `Stub` accepts the
state that a pickle gives to an object, and only into the fields that it declares.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Self

import numpy as np

from mpickpt.format.dtypes import parse_dtype


@dataclass(frozen=True)
class Stub:
    """Base of what a pickled object becomes; every field has a default."""

    def as_key(self) -> Any:
        """Return what stands for this object where it is the key of a dict.

        Raises
        ------
        TypeError
            If its class is not known for being one.
        """
        raise TypeError(f"a key of type {type(self).__name__}")

    def set_state(self, state: Any) -> None:
        """Take the fields that the class declares from a state, and drop the rest.

        Parameters
        ----------
        state : dict, or (None or dict, dict)
            Values of attributes by name, or those of `__dict__` and of slots.

        Raises
        ------
        TypeError
            If it is anything else.
        """
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        cls: Any = type(self)
        known = _field_names(cls)
        for part in parts:
            if part is None:
                continue
            if not isinstance(part, dict):
                raise TypeError(f"a state of type {type(part).__name__}")
            for name in known:
                if name in part:
                    object.__setattr__(self, name, part[name])


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


@dataclass(frozen=True)
class Opaque(Stub):
    """An object whose attributes are kept as they are, whatever their names.

    Parameters
    ----------
    arguments : tuple
        What it was made with.
    attributes : dict
        Its state by name; empty when it had none, or one that is no dict.
    """

    arguments: tuple[Any, ...] = ()
    attributes: dict[Any, Any] | None = None

    @classmethod
    def made(cls, *arguments: Any) -> Self:
        """Return one that was called with these arguments."""
        return cls(arguments=arguments)

    def set_state(self, state: Any) -> None:
        """Keep the attributes."""
        attributes = state if isinstance(state, dict) else {"state": state}
        object.__setattr__(self, "attributes", attributes)


class NotDataError(TypeError):
    """A call that a pickle asks for is none that makes data; says what it asks for."""


@dataclass(frozen=True)
class Enumeration:
    """Stands for an enumeration of a framework.

    Parameters
    ----------
    make : callable
        Gives what stands for a member from its value.
    values : mapping of str to object, optional
        The value of each member by its name; one that is not there is known by name.
    """

    make: Callable[[Any], Any]
    values: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, value: Any) -> Any:
        """Return a member by its value, as most versions of Python pickle it."""
        return self.make(value)


def member_named(*arguments: Any) -> Any:
    """Stand for `getattr`, by which Python 3.11.0 to 3.11.3 pickle enumerations.

    Raises
    ------
    NotDataError
        It is asked for an attribute of anything else.
    """
    enumeration, name = arguments if len(arguments) == 2 else (None, None)
    if not isinstance(enumeration, Enumeration) or type(name) is not str:
        raise NotDataError("builtins.getattr")
    return enumeration.make(enumeration.values.get(name, name))


class StubDict(dict[Any, Any]):
    """A mapping of any class that pickles as an ordered one; attributes are dropped."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        # An OrderedDict may be made of pairs, a defaultdict of a factory.
        super().__init__()
        if arguments and isinstance(arguments[0], list):
            for name, value in arguments[0]:
                self[str_key(name)] = value


@dataclass(frozen=True)
class StorageType:
    """A class of torch's storages: the element type of what lies in a file.

    Parameters
    ----------
    name : str
        The class, such as "BFloat16Storage".
    dtype_name : str
        The type in our words.
    """

    name: str
    dtype_name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type.

        Raises
        ------
        ValueError
            If this machine lacks it.
        """
        return parse_dtype(self.dtype_name)


@dataclass(frozen=True)
class TorchDtype:
    """A `torch.dtype`, whether or not numpy has it here.

    Parameters
    ----------
    name : str
        Its name in torch, such as "bfloat16".
    dtype_name : str
        The type in our words.
    """

    name: str
    dtype_name: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type; ValueError if this machine lacks it."""
        return parse_dtype(self.dtype_name)


@dataclass(frozen=True)
class StubTensor(Stub):
    """A tensor as a pickle describes it: a view of a storage.

    Parameters
    ----------
    storage : object
        What `persistent_load` gave for its storage.
    storage_offset : int
        First element in the storage.
    shape, strides : tuple of int
        In elements.
    dtype : TorchDtype or None
        Where the storage is untyped; None where the storage says it.
    """

    storage: Any = None
    storage_offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    dtype: TorchDtype | None = None


def str_key(name: Any) -> str:
    """Return a key that must be text."""
    if type(name) is not str:
        raise TypeError(f"a key of type {type(name).__name__}")
    return name
