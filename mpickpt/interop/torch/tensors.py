"""Shows torch's tensors as numpy's arrays and back, bit for bit; copies nothing.

Knows torch and numpy; neither files nor MPI.
"""

from functools import cache
from typing import Any

import numpy as np
import torch

from mpickpt.errors import StateTypeError

Array = np.ndarray[Any, Any]

_NATIVE = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# numpy knows these through ml_dtypes, torch not at all: both see integers between.
_CARRIERS = {
    "bfloat16": "int16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
}


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor of any kind, a parameter or a DTensor too."""
    return isinstance(value, torch.Tensor)


def require_savable(tensor: Any, name: str) -> None:
    """Raise `StateTypeError` unless the elements of a tensor can be seen as they lie.

    Parameters
    ----------
    tensor : torch.Tensor
        On any device; no DTensor.
    name : str
        Where it is, for the message.
    """
    why = _refusal(tensor)
    if why is not None:
        raise StateTypeError(f"{name!r} is {why}", key=name)


def _refusal(tensor: Any) -> str | None:
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return (
            f"an {kind.__name__}, which has no shape yet; run one forward pass, or "
            "give the module its sizes"
        )
    if kind not in (torch.Tensor, torch.nn.Parameter):
        return (
            f"a {kind.__module__}.{kind.__qualname__}, a tensor of a class of its own; "
            "save the plain tensors that it is made of"
        )
    if tensor.is_nested:
        return "a nested tensor; save its values and its offsets as two"
    if tensor.is_quantized:
        return (
            f"a quantized tensor ({tensor.dtype}); save tensor.int_repr() beside its "
            "scale and zero point"
        )
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}; save its indices and its values"
    if tensor.device.type == "meta":
        return (
            "a tensor on the meta device, which has no elements; call "
            "module.to_empty(device=...) first"
        )
    if tensor.dtype not in _names():
        return f"a tensor of {tensor.dtype}, which has no counterpart in numpy"
    return None


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return numpy's type of torch's type.

    Raises
    ------
    StateTypeError
        There is none, or it comes with `ml_dtypes`, which is not installed.
    """
    name = _names().get(dtype)
    if name is None:
        raise StateTypeError(f"{dtype} has no counterpart in numpy")
    return _numpy_dtype(name)


@cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name not in _CARRIERS:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise StateTypeError(
            f"tensors of torch.{name} need ml_dtypes: pip install 'mpickpt[torch]'"
        ) from error
    if not hasattr(ml_dtypes, name):
        raise StateTypeError(
            f"tensors of torch.{name} need a newer ml_dtypes than "
            f"{ml_dtypes.__version__}"
        )
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


@cache
def _names() -> dict[Any, str]:
    """Return the name of each type that can be saved."""
    names = (*_NATIVE, *_CARRIERS)
    return {getattr(torch, name): name for name in names if hasattr(torch, name)}


def array_of(tensor: Any, name: str) -> Array:
    """Return a tensor in this process's memory as an array that shares its elements.

    Parameters
    ----------
    tensor : torch.Tensor, shape (N_0, ..., N_{d-1})
        Any strides; no DTensor.
    name : str
        Where it is, for a message.

    Returns
    -------
    ndarray, shape (N_0, ..., N_{d-1})
        Read-only where writing one element would write others too, and where the
        tensor is conjugated or negated lazily: then it is a copy.
    """
    require_savable(tensor, name)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        copied: Array = tensor.resolve_conj().resolve_neg().numpy()
        return _read_only(copied)
    array = _shared(tensor)
    if array.size > 1 and any(
        stride == 0 and n > 1
        for stride, n in zip(array.strides, array.shape, strict=True)
    ):
        return _read_only(array)
    return array


def _shared(tensor: Any) -> Array:
    array: Array
    carrier = _CARRIERS.get(_names()[tensor.dtype])
    if carrier is None:
        array = tensor.numpy()
        return array
    array = tensor.view(getattr(torch, carrier)).numpy()
    return array.view(numpy_dtype(tensor.dtype))


def _read_only(array: Array) -> Array:
    array = array.view()
    array.flags.writeable = False
    return array


def tensor_of(array: Array) -> Any:
    """Return an array as a tensor; they share their elements where torch can.

    Parameters
    ----------
    array : ndarray, shape (N_0, ..., N_{d-1})
        In the machine's byte order; copied where strides are negative, or where it
        may not be written.
    """
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    name = array.dtype.name
    if name not in _CARRIERS:
        return torch.from_numpy(array)
    carrier = torch.from_numpy(array.view(_CARRIERS[name]))
    return carrier.view(getattr(torch, name))


def shares_memory(tensor: Any, array: Array) -> bool:
    """Tell whether an array is the view of a tensor that `array_of` gave."""
    if tensor.device.type != "cpu" or tuple(tensor.shape) != array.shape:
        return False
    address: int = array.__array_interface__["data"][0]
    return bool(address == tensor.data_ptr())
