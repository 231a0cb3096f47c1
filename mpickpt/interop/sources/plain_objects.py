"""Turns what a pickle of plain values described into nodes of a tree; no I/O.

Objects of a few classes that hold settings, numpy's arrays and torch's tensors have
stand-ins; a class that is not listed here never gets this far.
"""

from collections.abc import Callable
from dataclasses import dataclass
from signal import Signals
from typing import Any

import numpy as np

from mpickpt.errors import ManifestError
from mpickpt.format.tree import (
    MAX_DEPTH,
    ArrayNode,
    DictNode,
    Key,
    ListNode,
    Node,
    Plain,
)
from mpickpt.interop.sources.allowlist import STANDARD, Allowlist
from mpickpt.interop.sources.stubs import (
    Enumeration,
    Opaque,
    Stub,
    StubDict,
    TorchDtype,
)

# Nodes that a value may become whatever its size, and how many more for each byte.
_FEW_NODES = 100_000
_NODES_PER_BYTE = 2
# Text as long as that counts as one more.
_TEXT_PER_NODE = 16
SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_NUMPY_KINDS = "biufc"


@dataclass(frozen=True)
class Settings(Opaque):
    """An object that is no more than its attributes, such as `argparse.Namespace`."""


@dataclass(frozen=True)
class EnumMember(Opaque):
    """A member of an enumeration: its value, or where that is not known its name."""


@dataclass(frozen=True)
class ByteStream(Stub):
    """An `io.BytesIO`: its bytes, which are never looked into."""

    content: bytes = b""

    def set_state(self, state: Any) -> None:
        """Take the bytes from (bytes, position, attributes)."""
        if type(state) is not tuple or not state or type(state[0]) is not bytes:
            raise TypeError("a stream without bytes")
        object.__setattr__(self, "content", state[0])


@dataclass(frozen=True)
class NumpyDtype(Stub):
    """A `numpy.dtype` of numbers."""

    code: Any = ""
    align: Any = False
    copy: Any = True
    byte_order: Any = "|"

    def set_state(self, state: Any) -> None:
        """Take the byte order; fields and shapes are refused."""
        if (
            type(state) is not tuple
            or len(state) < 5
            or state[1] not in ("<", ">", "|")
            or any(part is not None for part in state[2:5])
        ):
            raise TypeError("a dtype with fields")
        object.__setattr__(self, "byte_order", state[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type itself."""
        if type(self.code) is not str or len(self.code) > 4:
            raise TypeError("a dtype without a code")
        dtype = np.dtype(self.code)
        if dtype.kind not in _NUMPY_KINDS:
            raise TypeError(f"an array of {dtype}")
        return dtype.newbyteorder(self.byte_order)


@dataclass(frozen=True)
class NumpyArray(Stub):
    """A `numpy.ndarray` of numbers."""

    array: Any = None

    def set_state(self, state: Any) -> None:
        """Take (version, shape, dtype, is Fortran's order, bytes)."""
        if type(state) is not tuple or len(state) != 5:
            raise TypeError("an array without a state")
        _, shape, dtype, is_fortran, content = state
        if not isinstance(dtype, NumpyDtype) or type(content) is not bytes:
            raise TypeError("an array of objects")
        flat = np.frombuffer(content, dtype.dtype)
        # A view, whatever the order: a pickle may build many from the same bytes.
        array = flat.reshape(shape, order="F" if is_fortran else "C")
        object.__setattr__(self, "array", array)


class NumpyArrayClass:
    """Stands for `numpy.ndarray` where it is named as a type."""


def _new_array(kind: Any, *_: Any) -> NumpyArray:
    if kind is not NumpyArrayClass:
        raise TypeError("an array of a class of its own")
    return NumpyArray()


def _scalar(dtype: Any, content: Any) -> Any:
    if not isinstance(dtype, NumpyDtype) or type(content) is not bytes:
        raise TypeError("a scalar that is an object")
    return np.frombuffer(content, dtype.dtype, count=1)[0]


def _numpy() -> Allowlist:
    names: Allowlist = {
        ("numpy", "ndarray"): NumpyArrayClass,
        ("numpy", "dtype"): NumpyDtype,
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names[module, "_reconstruct"] = _new_array
        names[module, "scalar"] = _scalar
    return names


_SIGNALS = {signal.name: int(signal.value) for signal in Signals}
# Until version 3.11.3 Python wrote them as constants of their module.
_SIGNALS_BY_NAME = {("signal", name): value for name, value in _SIGNALS.items()}
_MEMBER = Enumeration(EnumMember.made)
# Those that Megatron-LM itself declares safe, and what its arguments hold beside them.
PLAIN_OBJECTS: Allowlist = (
    STANDARD
    | _numpy()
    | _SIGNALS_BY_NAME
    | {
        ("_io", "BytesIO"): ByteStream,
        ("argparse", "Namespace"): Settings,
        ("types", "SimpleNamespace"): Settings,
        ("pathlib", "PosixPath"): Opaque.made,
        ("pathlib._local", "PosixPath"): Opaque.made,
        ("signal", "Signals"): Enumeration(EnumMember.made, _SIGNALS),
        ("megatron.core.enums", "ModelType"): _MEMBER,
        ("megatron.core.optimizer", "OptimizerConfig"): Settings,
        ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"): Settings,
        ("megatron.core.rerun_state_machine", "RerunDiagnostic"): _MEMBER,
        ("megatron.core.rerun_state_machine", "RerunMode"): _MEMBER,
        ("megatron.core.rerun_state_machine", "RerunState"): _MEMBER,
        ("megatron.core.transformer.enums", "AttnBackend"): _MEMBER,
        ("megatron.core.transformer.enums", "AttnMaskType"): _MEMBER,
        ("megatron.core.transformer.enums", "CudaGraphScope"): _MEMBER,
    }
)


def plainer(value: Any) -> Any:
    """Return the plain value that a stand-in, or a set, is written as; else itself."""
    if isinstance(value, TorchDtype):
        return f"torch.{value.name}"
    if isinstance(value, EnumMember) and len(value.arguments) == 1:
        return value.arguments[0]
    if isinstance(value, Settings):
        return value.attributes or {}
    if type(value) in (set, frozenset):
        # In an order that does not change from one process to the next.
        return sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    if type(value) is Opaque and all(type(p) is str for p in value.arguments):
        # A path, by its parts: that of the root is a slash itself.
        return "/".join(value.arguments).replace("//", "/", 1)
    return value


class NodeMaker:
    """Makes nodes of one unpickled value and collects the arrays in it.

    Parameters
    ----------
    where : str
        The file and the key, for errors.
    nbytes : int
        Size of what the value was read from. Values that refer to one another, over
        and over, can be written in few bytes and be more than any memory.
    is_array : callable
        Whether a value is a tensor as the reader of the file gives it.

    Attributes
    ----------
    arrays : list
        Tensors and numpy arrays, in the order in which they are met.
    """

    def __init__(
        self, where: str, nbytes: int, is_array: Callable[[Any], bool]
    ) -> None:
        self.where = where
        self.nodes_left = _FEW_NODES + _NODES_PER_BYTE * nbytes
        self.is_array = is_array
        self.arrays: list[Any] = []

    def node(self, value: Any, depth: int = 0) -> Node:
        """Return the value as nodes; an `ArrayNode` has its ordinal in `arrays`.

        Raises
        ------
        ManifestError
            If it is nested too deep, is too large, or holds what is no plain value.
        """
        kind = type(value)
        length = len(value) if kind is str or kind is bytes else 0
        self._count(length, depth)
        if kind in SCALARS or isinstance(value, np.generic):
            return Plain(value)
        if self.is_array(value) or isinstance(value, NumpyArray):
            self.arrays.append(getattr(value, "array", value))
            return ArrayNode(len(self.arrays) - 1)
        if kind is dict or kind is StubDict:
            return self._dict(value, depth)
        if kind is list or kind is tuple:
            children = tuple(self.node(child, depth + 1) for child in value)
            return ListNode(children, kind.__name__)
        return self._stand_in(value, depth)

    def _dict(self, value: dict[Any, Any], depth: int) -> Node:
        items: list[tuple[Key, Node]] = []
        for key, child in value.items():
            if type(key) is not str and type(key) is not int:
                raise self.refused(f"the dict key {key!r}; keys are str or int")
            self._count(len(key) if type(key) is str else 0, depth)
            items.append((key, self.node(child, depth + 1)))
        return DictNode(tuple(items))

    def _count(self, length: int, depth: int) -> None:
        self.nodes_left -= 1 + length // _TEXT_PER_NODE
        if depth > MAX_DEPTH or self.nodes_left < 0:
            raise self.refused("values nested too deep, or too many of them")

    def _stand_in(self, value: Any, depth: int) -> Node:
        if isinstance(value, ByteStream):
            return self.node(value.content, depth)
        meant = plainer(value)
        if meant is value:
            raise self.refused(f"a {type(value).__name__}")
        return self.node(meant, depth + 1)

    def refused(self, what: str) -> ManifestError:
        """Return the error that says what cannot be imported."""
        return ManifestError(
            f"{self.where} holds {what}, which is neither a plain value nor an array; "
            "leave it out with skip=[...], or write it anew without that"
        )
