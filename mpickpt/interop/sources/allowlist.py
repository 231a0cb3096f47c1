"""Says what may stand for the globals in what torch has pickled; touches nothing."""

from collections.abc import Callable
from typing import Any

from mpickpt.interop.sources.stubs import (
    StorageType,
    StubDict,
    StubTensor,
    TorchDtype,
    member_named,
)

Allowlist = dict[tuple[str, str], Any]

_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
TORCH_DTYPES = {
    "bfloat16": "bfloat16",
    "bool": "bool",
    "complex128": "complex128",
    "complex64": "complex64",
    "float16": "float16",
    "float32": "float32",
    "float64": "float64",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "int8": "int8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "uint8": "uint8",
}
_MOST_AXES = 64
# Larger integers can be made to collide as keys.
_MOST_MEMBER = 1 << 60


class TensorClass:
    """Stands for `torch.Tensor` and its Parameter where they are named as types."""


def rebuild_tensor(
    storage: Any, storage_offset: Any, shape: Any, strides: Any, *_: Any
) -> StubTensor:
    """Stand for `torch._utils._rebuild_tensor_v2`."""
    return StubTensor(
        storage=storage,
        storage_offset=_index(storage_offset),
        shape=_indices(shape),
        strides=_indices(strides),
    )


def rebuild_typed_tensor(*arguments: Any) -> StubTensor:
    """Stand for `torch._utils._rebuild_tensor_v3`, whose storage has no type."""
    storage, storage_offset, shape, strides, _, _, dtype = arguments[:7]
    if not isinstance(dtype, TorchDtype):
        raise TypeError("a tensor without a dtype")
    return StubTensor(
        storage=storage,
        storage_offset=_index(storage_offset),
        shape=_indices(shape),
        strides=_indices(strides),
        dtype=dtype,
    )


def rebuild_parameter(tensor: Any, *_: Any) -> Any:
    """Stand for `torch._utils._rebuild_parameter`, with or without attributes."""
    return tensor


def rebuild_from_type(
    function: Any, new_type: Any, arguments: Any, state: Any = None
) -> Any:
    """Stand for `torch._tensor._rebuild_from_type_v2`; attributes are dropped."""
    known: tuple[Callable[..., Any], ...] = (
        rebuild_tensor,
        rebuild_typed_tensor,
        rebuild_parameter,
    )
    if new_type is not TensorClass or not any(function is each for each in known):
        raise TypeError("a tensor of a class of its own")
    return function(*arguments)


def size(lengths: Any = ()) -> tuple[int, ...]:
    """Stand for `torch.Size`."""
    return _indices(lengths)


def text(name: Any = "", *_: Any) -> str:
    """Stand for what is told by its name: a device, a layout, a path."""
    if type(name) is not str:
        raise TypeError("a name that is no text")
    return name


def encoded(characters: Any, encoding: Any = "latin1") -> bytes:
    """Stand for `_codecs.encode`, by which protocol 2 writes bytes."""
    if type(characters) is not str or encoding != "latin1":
        raise TypeError("bytes that are not written as latin1")
    return characters.encode("latin1")


def complex_number(real: Any, imaginary: Any) -> complex:
    """Stand for `complex`."""
    return complex(float(real), float(imaginary))


def no_bytes(*arguments: Any) -> bytes:
    """Stand for `bytes`, which protocol 2 calls for the empty ones."""
    if arguments:
        raise TypeError("bytes made of something")
    return b""


def made_set(members: Any = ()) -> set[Any]:
    """Stand for `set` and `frozenset`, which protocol 2 calls with a list."""
    if type(members) not in (list, tuple):
        raise TypeError(f"a set made of a {type(members).__name__}")
    for member in members:
        is_small = type(member) is int and abs(member) < _MOST_MEMBER
        if type(member) not in (str, bytes) and not is_small:
            raise TypeError(f"a {type(member).__name__} in a set")
    return set(members)


def _index(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise TypeError(f"{type(number).__name__} as an index")
    return number


def _indices(numbers: Any) -> tuple[int, ...]:
    if type(numbers) not in (tuple, list) or len(numbers) > _MOST_AXES:
        raise TypeError(f"{type(numbers).__name__} as a shape")
    return tuple(map(_index, numbers))


def _torch() -> Allowlist:
    names: Allowlist = {
        ("torch", name): StorageType(name, dtype) for name, dtype in _STORAGES.items()
    }
    names |= {
        ("torch", name): TorchDtype(name, dtype) for name, dtype in TORCH_DTYPES.items()
    }
    names |= {
        ("torch.storage", "UntypedStorage"): StorageType("UntypedStorage", "uint8"),
        ("torch", "Size"): size,
        ("torch", "device"): text,
        ("torch", "Tensor"): TensorClass,
        ("torch.nn.parameter", "Parameter"): TensorClass,
        ("torch.serialization", "_get_layout"): text,
        ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
        ("torch._utils", "_rebuild_tensor_v3"): rebuild_typed_tensor,
        ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): rebuild_parameter,
        ("torch._tensor", "_rebuild_from_type_v2"): rebuild_from_type,
    }
    return names


# What tensors and plain values need, whoever wrote them.
STANDARD: Allowlist = _torch() | {
    ("collections", "OrderedDict"): StubDict,
    ("collections", "defaultdict"): StubDict,
    ("_codecs", "encode"): encoded,
    ("builtins", "complex"): complex_number,
    ("builtins", "bytes"): no_bytes,
    ("builtins", "dict"): StubDict,
    ("builtins", "set"): made_set,
    ("builtins", "frozenset"): made_set,
    ("builtins", "getattr"): member_named,
}
