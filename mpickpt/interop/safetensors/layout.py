"""Says how tensors lie in safetensors files and what these are called; no I/O.

A file is the length of its header, 8 bytes little-endian; the header, JSON; and the
tensors, C order and little-endian, one after the other without a gap.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpickpt.format.dtypes import dtype_name

INDEX_NAME = "model.safetensors.index.json"
METADATA_KEY = "__metadata__"

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
}
# What the format's own reader takes.
_MAX_HEADER_NBYTES = 100_000_000
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor that is going to be in a file.

    Attributes
    ----------
    name : str
        What a loader calls it.
    dtype : numpy.dtype
        Little-endian, one of those that the format has.
    shape : tuple of int
        Elements on each axis.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFile:
    """One file: what its header says, and where each tensor begins.

    Attributes
    ----------
    name : str
        Its name in the directory.
    head : bytes
        All that precedes the tensors.
    offsets : dict of str to int
        First byte in the file of each tensor, by its name.
    nbytes : int
        Size of the file.
    """

    name: str
    head: bytes
    offsets: dict[str, int]
    nbytes: int


def safetensors_dtype(dtype: np.dtype[Any]) -> str | None:
    """Return what the format calls a type; None if it has no such type."""
    try:
        return _DTYPES.get(dtype_name(dtype.newbyteorder("<")))
    except TypeError:
        return None


def plan_files(
    tensors: Sequence[Tensor], max_nbytes: int, aliases: Mapping[str, str]
) -> list[TensorFile]:
    """Return the files that hold tensors, in their order, of at most so many bytes.

    Parameters
    ----------
    tensors : sequence of Tensor
        One at least, with names that differ.
    max_nbytes : int
        Of the tensors in one file; one that is larger has a file to itself.
    aliases : mapping of str to str
        Further names of tensors, noted in the header where there is one file.

    Raises
    ------
    ValueError
        If a header is larger than the format allows.
    """
    groups = _groups(tensors, max_nbytes)
    count = len(groups)
    notes = noted_aliases(aliases) if count == 1 else {}
    return [
        _file(_file_name(number, count), group, {"format": "pt", **notes})
        for number, group in enumerate(groups, 1)
    ]


def dump_index(files: Sequence[TensorFile], aliases: Mapping[str, str]) -> bytes:
    """Return the JSON that tells loaders in which file each tensor is."""
    total = sum(file.nbytes - len(file.head) for file in files)
    places = {name: file.name for file in files for name in file.offsets}
    document = {
        "metadata": {"total_size": total, **noted_aliases(aliases)},
        "weight_map": dict(sorted(places.items())),
    }
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def noted_aliases(aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the further names that metadata can hold beside what must be in it."""
    taken = ("format", "total_size")
    return {name: kept for name, kept in aliases.items() if name not in taken}


def _groups(tensors: Sequence[Tensor], max_nbytes: int) -> list[list[Tensor]]:
    """Return what goes into each file, exactly as the hub's own writer has it."""
    groups: list[list[Tensor]] = []
    current: list[Tensor] = []
    room = max_nbytes
    for tensor in tensors:
        if tensor.nbytes > max_nbytes:
            groups.append([tensor])
            continue
        if tensor.nbytes > room:
            groups.append(current)
            current, room = [], max_nbytes
        current.append(tensor)
        room -= tensor.nbytes
    return [*groups, current] if current else groups


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _file(
    name: str, tensors: Sequence[Tensor], metadata: Mapping[str, str]
) -> TensorFile:
    # Widest elements first, as the library writes them: each tensor is aligned then.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    entries: dict[str, Any] = {METADATA_KEY: dict(metadata)}
    starts, position = {}, 0
    for tensor in ordered:
        starts[tensor.name], end = position, position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": safetensors_dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    if len(text) > _MAX_HEADER_NBYTES:
        raise ValueError(
            f"{name} would have a header of {len(text)} bytes for {len(tensors)} "
            f"tensors; safetensors reads at most {_MAX_HEADER_NBYTES}: choose smaller "
            "files"
        )
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    offsets = {tensor: len(head) + start for tensor, start in starts.items()}
    return TensorFile(
        name=name, head=head, offsets=offsets, nbytes=len(head) + position
    )
