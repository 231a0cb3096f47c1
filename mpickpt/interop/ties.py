"""Tied parameters: an alias names the parameter whose bytes it shares."""

from typing import Any

TIED = "tied_to"


def tie(name: str) -> dict[str, str]:
    """Return what stands in a module's tree in place of a tied parameter.

    Parameters
    ----------
    name : str
        Name of the parameter that has the bytes, in the same module.
    """
    return {TIED: name}


def tied_to(value: Any) -> str | None:
    """Return the name that an alias stands for, or None where it is no alias."""
    if isinstance(value, dict) and list(value) == [TIED]:
        name = value[TIED]
        return name if isinstance(name, str) else None
    return None
