"""How one rank fared, as values that JSON can hold."""

import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpickpt import CheckpointError

Said = dict[str, Any]


def attempt(call: Callable[..., Any], *arguments: Any, **options: Any) -> Said:
    """Call, and tell what was returned or what was raised."""
    begin = time.monotonic()
    said: Said = {"class": None}
    try:
        said["value"] = call(*arguments, **options)
    except CheckpointError as error:
        names = ("rank", "host", "errno", "path", "outcome")
        said = {name: getattr(error, name, None) for name in names}
        said |= {"class": type(error).__name__, "text": str(error)}
        said["failing"] = sorted(error.failures)
    said["host here"] = MPI.Get_processor_name()
    return said | {"seconds": time.monotonic() - begin}
