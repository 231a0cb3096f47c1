"""Describes a tensor that lies in a file of torch.save, and streams it; no MPI."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpickpt.format.hyperslab import Hyperslab, contiguous_pieces, whole
from mpickpt.state import StreamedArray

if TYPE_CHECKING:
    from mpickpt.interop.sources.stored_entry import StoredEntry
    from mpickpt.interop.sources.torch_file import TorchFile

Array = np.ndarray[Any, Any]

# What is not one run of bytes is read in blocks of this length.
_BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A view of a storage in a file of torch.save; several may share one.

    Parameters
    ----------
    file : TorchFile
        Where the storage is.
    storage : str
        Its key there.
    dtype : numpy.dtype
        Element type.
    shape, strides : tuple of int
        Of the view, in elements.
    offset : int
        First element of the view in the storage.
    is_run : bool
        It is known to be one run of the storage.
    """

    file: "TorchFile"
    storage: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_run: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are one run of the storage, in C order."""
        return (
            self.is_run
            or self.size < 2
            or all(
                n == 1 or stride == expected
                for n, stride, expected in zip(
                    self.shape, self.strides, c_strides(self.shape), strict=True
                )
            )
        )

    @property
    def place(self) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
        """What is equal for views of the same elements alone: tied parameters."""
        where = str(self.file.source.path)
        return where, self.storage, self.offset, self.shape, self.strides

    def run(self, start: int, shape: tuple[int, ...]) -> "StoredTensor":
        """Return the run of elements from `start` on, as an array of that shape.

        Parameters
        ----------
        start : int
            First element, counted in C order; the tensor must be contiguous.
        """
        if not self.is_contiguous or start + math.prod(shape) > self.size:
            raise ValueError(f"no run of shape {shape} at {start} in {self.shape}")
        return StoredTensor(
            self.file,
            self.storage,
            self.dtype,
            shape,
            c_strides(shape),
            self.offset + start,
            is_run=True,
        )

    def small(self) -> Array | None:
        """Return the elements if the storage is one that is kept with the pickle."""
        content = self.file.small_storage(self.storage)
        if content is None or self.size == 0:
            return None if self.size else np.empty(self.shape, self.dtype)
        return self.of_bytes(np.frombuffer(content, np.uint8), 0, whole(self.shape))

    def as_streamed(
        self, *, cast: np.dtype[Any] | None = None, use: str = ""
    ) -> StreamedArray:
        """Return the elements as an array that reads them when a save writes them.

        Parameters
        ----------
        cast : numpy.dtype, optional
            Type to convert the elements to, rounding to nearest even.
        use : str
            The bytes are verified once for each `use`: whoever reads them twice names
            two.

        Notes
        -----
        The last read of what was asked for of a storage compares the CRC-32 of all of
        that storage, and raises `CorruptShardError`. A save fails by that before it
        is published.
        """
        entry = self.file.entry(self.storage, use)
        kind = StreamedRun if self.is_contiguous else StreamedBlock
        return kind(self, entry, cast or self.dtype)

    def boxes(self) -> Iterator[tuple[tuple[int, ...], "StoredTensor"]]:
        """Yield offset and view of boxes that tile it and are cheap to read in turn.

        A contiguous tensor is one; another is cut across the axis that is outermost in
        the file, so that no box spans more than a few MiB.
        """
        if self.is_contiguous:
            yield (0,) * len(self.shape), self
            return
        yield from self._blocks(whole(self.shape))

    def span(self) -> tuple[int, int]:
        """Return the first element in the storage, and the one after the last."""
        if self.size == 0:
            return self.offset, self.offset
        reach = sum(
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )
        return self.offset, self.offset + reach + 1

    def _blocks(
        self, box: Hyperslab
    ) -> Iterator[tuple[tuple[int, ...], "StoredTensor"]]:
        part = self._view(box)
        first, last = part.span()
        axis = max(
            range(len(box.shape)),
            key=lambda i: (box.shape[i] > 1, self.strides[i], box.shape[i]),
        )
        is_short = max(last - first, part.size) * self.dtype.itemsize <= _BLOCK_NBYTES
        if is_short or box.shape[axis] < 2:
            yield box.offset, part
            return
        half = box.shape[axis] // 2
        for start, length in ((0, half), (half, box.shape[axis] - half)):
            offset, shape = list(box.offset), list(box.shape)
            offset[axis] += start
            shape[axis] = length
            yield from self._blocks(Hyperslab(tuple(offset), tuple(shape)))

    def _view(self, box: Hyperslab) -> "StoredTensor":
        moved = sum(o * s for o, s in zip(box.offset, self.strides, strict=True))
        return replace(self, shape=box.shape, offset=self.offset + moved, is_run=False)

    def of_bytes(self, content: Array, first_byte: int, box: Hyperslab) -> Array:
        """Return a copy of a box, given bytes of the storage from `first_byte` on."""
        part = self._view(box)
        itemsize = self.dtype.itemsize
        view = np.ndarray(
            part.shape,
            self.dtype,
            content.data,
            part.offset * itemsize - first_byte,
            tuple(stride * itemsize for stride in self.strides),
        )
        return np.array(view)


class StreamedRun(StreamedArray):
    """Reads boxes of what is one run of a storage; there may be a million of these."""

    __slots__ = ("_entry", "_first", "_stored", "dtype", "shape")

    def __init__(
        self, tensor: StoredTensor, entry: "StoredEntry", dtype: np.dtype[Any]
    ) -> None:
        self.shape = tensor.shape
        self.dtype = dtype
        self._entry = entry
        self._stored = tensor.dtype
        self._first = tensor.offset
        itemsize = tensor.dtype.itemsize
        stop = tensor.offset + tensor.size
        entry.expect(tensor.offset * itemsize, stop * itemsize)

    def read(self, box: tuple[slice, ...]) -> Array:
        """Return the elements of a box."""
        slab = _slab(box)
        if slab.is_empty:
            return np.empty(slab.shape, self.dtype)
        return _cast(self._elements(slab), self.dtype)

    def _elements(self, slab: Hyperslab) -> Array:
        strides = c_strides(self.shape)
        pairs = list(zip(slab.offset, slab.shape, strides, strict=True))
        first = self._first + sum(offset * stride for offset, _, stride in pairs)
        reach = sum((n - 1) * stride for _, n, stride in pairs) + 1
        if reach == slab.size:
            itemsize = self._stored.itemsize
            content = self._entry.read(first * itemsize, (first + reach) * itemsize)
            return np.frombuffer(content, self._stored).reshape(slab.shape)
        # Not one run of the file: a box of a few rows and some columns.
        elements = np.empty(slab.shape, self._stored)
        for piece in contiguous_pieces(slab.shape, 1, slab.shape[-1]):
            moved = zip(slab.offset, piece.offset, strict=True)
            inner = Hyperslab(tuple(a + b for a, b in moved), piece.shape)
            elements[piece.slices()] = self._elements(inner)
        return elements


class StreamedBlock(StreamedArray):
    """Reads a view that is no run of its storage, all at once, and gives boxes of it.

    It is kept until all of it was given.
    """

    def __init__(
        self, tensor: StoredTensor, entry: "StoredEntry", dtype: np.dtype[Any]
    ) -> None:
        self.shape = tensor.shape
        self.dtype = dtype
        self._tensor = tensor
        self._entry = entry
        self._content: Array | None = None
        self._n_left = tensor.size
        itemsize = tensor.dtype.itemsize
        self._start, self._stop = (element * itemsize for element in tensor.span())
        entry.expect(self._start, self._stop)

    def read(self, box: tuple[slice, ...]) -> Array:
        """Return the elements of a box."""
        slab = _slab(box)
        if slab.is_empty:
            return np.empty(slab.shape, self.dtype)
        content = self._content
        if content is None:
            read = self._entry.read(self._start, self._stop)
            content = self._content = np.frombuffer(read, np.uint8)
        elements = self._tensor.of_bytes(content, self._start, slab)
        self._n_left -= slab.size
        if self._n_left <= 0:
            self._content = None
        return _cast(elements, self.dtype)


def _slab(box: tuple[slice, ...]) -> Hyperslab:
    return Hyperslab(
        tuple(part.start for part in box),
        tuple(part.stop - part.start for part in box),
    )


def _cast(elements: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):  # too large becomes infinite, as in torch
        return elements.astype(dtype, copy=False)


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-ordered array."""
    strides, inner = [], 1
    for n in reversed(shape):
        strides.append(inner)
        inner *= n
    return tuple(reversed(strides))
