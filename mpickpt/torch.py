"""PyTorch's objects in a state tree: modules, optimizers, DTensors, generators.

::

    state = mpickpt.torch.adapt({"model": model, "optimizer": optimizer, "step": 0})
    mpickpt.save_sharded(state, path, step=0, comm=comm)
    mpickpt.load_sharded(path, comm=comm, like=state)  # fills model and optimizer

`DcpWriter` and `DcpReader` are storage for programs that save by
`torch.distributed.checkpoint`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    from mpickpt.interop.torch.adapt import adapt
    from mpickpt.interop.torch.random import RandomState
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "mpickpt.torch needs PyTorch: pip install 'mpickpt[torch]'"
    ) from error

if TYPE_CHECKING:
    from mpickpt.interop.dcp_storage.reader import DcpReader
    from mpickpt.interop.dcp_storage.writer import DcpWriter

__all__ = ["DcpReader", "DcpWriter", "RandomState", "adapt"]

# Imported when first used: torch.distributed.checkpoint takes seconds to import.
_LATER = {
    "DcpReader": "mpickpt.interop.dcp_storage.reader",
    "DcpWriter": "mpickpt.interop.dcp_storage.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'mpickpt.torch' has no attribute {name!r}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value
