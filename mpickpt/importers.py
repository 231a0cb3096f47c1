"""Checkpoints that other systems wrote, saved as ours; needs none of these systems.

::

    mpickpt.importers.deepspeed("ckpts", "run/step-0000000002", comm=comm)
    mpickpt.importers.dcp("dcp/step-100", "run/step-0000000100", comm=comm)
    mpickpt.importers.nemo("megatron", "run/step-0000000100", comm=comm)

All are collective and take any number of ranks. Nothing of a source is executed: its
pickles are read by a machine that knows data alone, its paths must stay inside it, and
whatever is damaged or not understood is an error before anything is published. The
shell's way is ``mpickpt import``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpickpt.interop.dcp.importer import dcp
    from mpickpt.interop.deepspeed.importer import deepspeed
    from mpickpt.interop.nemo.importer import nemo

_HOMES = {
    "dcp": "mpickpt.interop.dcp.importer",
    "deepspeed": "mpickpt.interop.deepspeed.importer",
    "nemo": "mpickpt.interop.nemo.importer",
}

__all__ = ["dcp", "deepspeed", "nemo"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
