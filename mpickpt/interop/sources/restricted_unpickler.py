"""Reads a pickle without running it: a machine of its own, with an allowlist.

Python's unpickler calls whatever a pickle names. This one knows the instructions that
protocols 2 to 5 write for data and refuses the others; a global is refused by name
unless the caller gave something to stand for it, and nothing else can be called. State
goes into stubs that declare their fields. Time and memory are proportional to the size
of the pickle, which is bounded. Neither touches files nor imports anything.
"""

import struct
from collections.abc import Callable
from typing import Any

from mpickpt.errors import CheckpointError, ManifestError
from mpickpt.interop.sources.allowlist import STANDARD
from mpickpt.interop.sources.pickle_machine import Allowlist, Machine
from mpickpt.interop.sources.pickle_steps import STEPS

__all__ = ["MOST_NBYTES", "STANDARD", "loads"]

MOST_NBYTES = 64 << 20


def loads(
    pickled: bytes,
    *,
    allow: Allowlist,
    persistent_load: Callable[[Any], Any] | None = None,
    where: str,
    max_nbytes: int = MOST_NBYTES,
) -> Any:
    """Return what a pickle describes, made of plain values and stubs.

    Parameters
    ----------
    pickled : bytes
        The whole pickle, of protocol 2 to 5.
    allow : mapping of (module, name) to object
        What stands for each global. Callables are called with the arguments that the
        pickle gives, and must accept anything; others are values.
    persistent_load : callable, optional
        Gives what a persistent id stands for; without it there may be none.
    where : str
        The file, and the part of it, for errors.
    max_nbytes : int
        Refuse a longer pickle: each byte may become some dozen bytes of memory.

    Raises
    ------
    ManifestError
        If it is damaged or too long, or asks for a global that is not in `allow`.
    """
    if len(pickled) > max_nbytes:
        raise ManifestError(
            f"{where} has a pickle of {len(pickled)} bytes; more than {max_nbytes} are "
            "not read, because tensors are stored beside it and not in it"
        )
    machine = Machine(bytes(pickled), allow, persistent_load, where)
    try:
        return machine.run(STEPS)
    except CheckpointError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        struct.error,
    ) as error:
        raise ManifestError(
            f"{where} has a damaged pickle, at byte {machine.position} of "
            f"{len(pickled)}: {type(error).__name__}: {error}"
        ) from error
