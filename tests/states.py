"""States to save, and how they are compared: type by type, byte for byte."""

import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mpickpt import PerRank, Replicated, Sharded, read_manifest
from tests.ranks_as_threads import run_ranks

_BYTE_ORDERS = ("<", ">")
_ONE_BYTE = ("?", "i1", "u1")
_WIDE = ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_UNITS = ("Y", "M", "D", "h", "m", "s", "ms", "us", "ns", "25s")
_FLOATS_OF_ML = (
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
DTYPES = tuple(
    np.dtype(spelling)
    for spelling in (
        *_ONE_BYTE,
        *(order + kind for order in _BYTE_ORDERS for kind in _WIDE),
        *(
            f"{order}{kind}8[{unit}]"
            for order in _BYTE_ORDERS
            for kind in "mM"
            for unit in _UNITS
        ),
        "<m8",
        "<M8",
        *(order + kind for order in _BYTE_ORDERS for kind in ("g", "G")),
        *("S1", "S7", "<U1", "<U5", ">U5"),
        *(getattr(ml_dtypes, name) for name in _FLOATS_OF_ML),
    )
)
_LONG_DOUBLES = (np.longdouble, np.clongdouble)


_X87_NBYTES = 10


def random_array(dtype: Any, shape: Sequence[int], seed: int) -> np.ndarray:
    """Return an array of random bits: infinities, NaN payloads, -0.0 among them."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(seed)
    count = math.prod(shape)
    if dtype.kind == "b":
        return (rng.integers(0, 2, count) == 1).reshape(shape)
    if dtype.kind == "U":
        points = rng.integers(1, 0x110000, (count, dtype.itemsize // 4), np.uint32)
        return points.astype(dtype.byteorder + "u4").view(dtype).reshape(shape)
    if dtype.type in _LONG_DOUBLES:
        parts = rng.standard_normal((2, count)).astype(np.longdouble) / 3
        value = parts[0] if dtype.kind == "f" else parts[0] + 1j * parts[1]
        return value.astype(dtype).reshape(shape)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy().reshape(shape)


def image_of(value: Any) -> Any:
    """Return what tells a state from every other: types, shapes and bytes."""
    if isinstance(value, np.ndarray):
        return ("array", _spelled(value.dtype), value.shape, bytes_of(value))
    if isinstance(value, np.generic):
        return ("scalar", _spelled(value.dtype), bytes_of(np.asarray(value)))
    if isinstance(value, Sharded | Replicated | PerRank):
        return _image_of_wrapper(value)
    if isinstance(value, dict):
        return {(type(key), key): image_of(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return (type(value), [image_of(child) for child in value])
    if type(value) in (float, complex):
        return (type(value), struct.pack(">dd", value.real, value.imag))
    return (type(value), value)


def bytes_of(array: np.ndarray) -> bytes:
    """Return the elements in C order; bytes between long doubles do not count."""
    content = array.tobytes()
    is_x87 = np.finfo(np.longdouble).nmant == 63
    if array.dtype.type not in _LONG_DOUBLES or not is_x87:
        return content
    slots = np.frombuffer(content, np.uint8).reshape(-1, np.dtype("g").itemsize)
    inside = slice(None, _X87_NBYTES)
    if array.dtype.byteorder == ">":
        inside = slice(-_X87_NBYTES, None)
    return slots[:, inside].tobytes()


def shard_digests(path: Path) -> list[str]:
    """Return the SHA-256 of every shard, in order of rank."""
    return [shard.sha256 for shard in read_manifest(path).shards]


def on_ranks(size: int, call: Callable[[Any], Any]) -> list[Any]:
    """Call on ranks as threads and return what they returned."""
    outcomes = run_ranks(size, call, timeout_s=60.0)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def failure_on_ranks(size: int, call: Callable[[Any], Any]) -> Exception:
    """Call on ranks as threads; return the error, which is the same on all."""
    outcomes = run_ranks(size, call, timeout_s=60.0)
    assert all(isinstance(outcome, Exception) for outcome in outcomes), outcomes
    assert len({(type(one), str(one)) for one in outcomes}) == 1, outcomes
    return outcomes[0]


def block_bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return start and stop of one of `size` even blocks; the first ones are longer."""
    parts = np.array_split(np.arange(length), size)
    start = sum(len(part) for part in parts[:rank])
    return start, start + len(parts[rank])


def emptied(value: Any) -> Any:
    """Return a state of the same form whose arrays hold other bytes."""
    if isinstance(value, np.ndarray):
        content = (b"\0" if value.dtype.kind == "U" else b"\1") * value.nbytes
        return np.frombuffer(bytearray(content), value.dtype).reshape(value.shape)
    if isinstance(value, Sharded):
        if value.boxes is not None:
            boxes = [(offset, emptied(array)) for offset, array in value.boxes]
            return Sharded.pieces(
                boxes, global_shape=value.global_shape, dtype=value.dtype
            )
        data = emptied(value.data)
        if value.consecutive:
            return Sharded.block(data)
        return Sharded(data, value.global_shape, value.offset)
    if isinstance(value, Replicated):
        return Replicated(emptied(value.data), value.check)
    if isinstance(value, PerRank):
        return PerRank(emptied(value.data), value.on_resize)
    if isinstance(value, dict):
        return {key: emptied(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(emptied(child) for child in value)
    return None


def arrays_in(value: Any) -> list[np.ndarray]:
    """Return the arrays of a state, in order."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, Sharded):
        if value.boxes is not None:
            return [array for _, array in value.boxes]
        return arrays_in(value.data)
    if isinstance(value, Replicated | PerRank):
        return arrays_in(value.data)
    if isinstance(value, dict):
        return [array for child in value.values() for array in arrays_in(child)]
    if isinstance(value, list | tuple):
        return [array for child in value for array in arrays_in(child)]
    return []


def _spelled(dtype: np.dtype) -> str:
    return f"{dtype.str} {dtype.name}"


def _image_of_wrapper(value: Sharded | Replicated | PerRank) -> Any:
    if isinstance(value, Replicated):
        return ("Replicated", value.check, image_of(value.data))
    if isinstance(value, PerRank):
        return ("PerRank", value.on_resize, image_of(value.data))
    boxes = value.boxes
    if boxes is None:
        boxes = ((value.offset, value.data),)
    return ("Sharded", value.global_shape, [(o, image_of(a)) for o, a in boxes])
