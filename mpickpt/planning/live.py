"""Reads and sets the state of live objects: generators, dataclasses, state_dict().

Knows Python and numpy; no framework, which come through adaptors.
"""

import dataclasses
import random
from typing import Any

import numpy as np


def record_fields(value: Any) -> list[tuple[str, Any]] | None:
    """Return the fields of a dataclass or namedtuple instance, else None."""
    if hasattr(value, "load_state_dict"):
        return None  # it says itself what its state is
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    return None


def is_generator(value: Any) -> bool:
    """Tell whether a value is one of numpy's or Python's random generators."""
    return isinstance(
        value,
        np.random.Generator
        | np.random.BitGenerator
        | np.random.RandomState
        | random.Random,
    )


def live_state(value: Any, *, template: bool = False) -> Any:
    """Return the state of a live object, or None where it is not one.

    As a template, an object that fills up as the program runs may say with
    ``state_dict_template()`` what its state is going to be.
    """
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.BitGenerator):
        return value.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, type) or not hasattr(value, "load_state_dict"):
        return None
    read = getattr(value, "state_dict", None)
    if template:
        read = getattr(value, "state_dict_template", read)
    return read() if callable(read) else None


def set_live_state(value: Any, state: Any) -> None:
    """Give a live object the state that `live_state` returned."""
    if isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.BitGenerator):
        value.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)
    else:
        value.load_state_dict(state)
