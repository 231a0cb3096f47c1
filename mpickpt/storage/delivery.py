"""Hands the bytes of a shard, as they are read, to whoever wants which part.

Parts are taken in file order. A part that is wanted as it is goes straight to its
array; one that is cast, cut or sent elsewhere is handed over in small boxes.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpickpt.format.hyperslab import Hyperslab, contiguous_pieces, whole
from mpickpt.storage.regions import PIECE_NBYTES, bytes_of

Array = np.ndarray[Any, Any]
Take = Callable[[Hyperslab, Array], None]


class Target(Protocol):
    """Bytes that can be assigned to, slice by slice."""

    def __setitem__(self, where: slice, content: memoryview, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A range of a shard's bytes and who takes them."""

    offset: int
    nbytes: int
    target: Target

    @property
    def stop(self) -> int:
        """First byte behind the range."""
        return self.offset + self.nbytes


def placed_at(offset: int, array: Array) -> Placed:
    """Return the bytes of a part, going to a writable array of its dtype and shape."""
    return Placed(offset=offset, nbytes=array.nbytes, target=target_of(array))


class Delivery:
    """Gives each part of a shard its bytes, as `read_shard` delivers them.

    Parameters
    ----------
    placed : sequence of Placed
        In any order; several may want the same bytes.

    Notes
    -----
    Bytes must come in file order.
    """

    def __init__(self, placed: Sequence[Placed]) -> None:
        self._placed = sorted(
            (one for one in placed if one.nbytes), key=lambda one: one.offset
        )
        self._next = 0
        self._open: list[Placed] = []

    def __call__(self, offset: int, view: memoryview) -> None:
        """Take the bytes at `offset` of the file; those of no part are dropped."""
        stop = offset + len(view)
        while self._next < len(self._placed) and self._placed[self._next].offset < stop:
            self._open.append(self._placed[self._next])
            self._next += 1
        for one in self._open:
            first, last = max(offset, one.offset), min(stop, one.stop)
            if first < last:
                part = view[first - offset : last - offset]
                one.target[first - one.offset : last - one.offset] = part
        self._open = [one for one in self._open if one.stop > stop]

    def spans(self) -> list[tuple[int, int]]:
        """Return the ranges of bytes that somebody wants, ascending, joined."""
        joined: list[tuple[int, int]] = []
        for one in self._placed:
            if joined and one.offset <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(joined[-1][1], one.stop))
            else:
                joined.append((one.offset, one.stop))
        return joined


class InBoxes:
    """Cuts the bytes of a stored box into small boxes and hands each one over.

    Parameters
    ----------
    box : Hyperslab
        The stored box, in the index space of the global array.
    dtype : dtype
        Of the stored elements.
    take : callable of (Hyperslab, ndarray)
        Gets each small box, in the same index space, and its elements, which are
        valid during the call only.
    """

    def __init__(self, box: Hyperslab, dtype: np.dtype[Any], take: Take) -> None:
        self._origin = box.offset
        self._dtype = dtype
        self._take = take
        self._boxes = contiguous_pieces(box.shape, dtype.itemsize, PIECE_NBYTES)
        self._begin(next(self._boxes))

    def __setitem__(self, where: slice, content: memoryview) -> None:
        while content:
            count = min(len(content), len(self._bytes) - self._filled)
            self._bytes[self._filled : self._filled + count] = content[:count]
            self._filled += count
            content = content[count:]
            if self._filled == len(self._bytes):
                self._take(self._box, self._piece)
                self._begin(next(self._boxes, None))

    def _begin(self, box: Hyperslab | None) -> None:
        if box is None:
            self._filled, self._bytes = 0, memoryview(b"")
            return
        offset = tuple(a + b for a, b in zip(box.offset, self._origin, strict=True))
        self._box = Hyperslab(offset, box.shape)
        self._piece = np.empty(box.shape, self._dtype)
        self._bytes = bytes_of(self._piece)
        self._filled = 0


class Digested:
    """Digests the bytes of a part that must be equal to other ranks'."""

    def __init__(self) -> None:
        self._hasher = hashlib.sha256()

    def __setitem__(self, where: slice, content: memoryview) -> None:
        self._hasher.update(content)

    def hexdigest(self) -> str:
        """Return the SHA-256 of all bytes."""
        return self._hasher.hexdigest()


def placing(target: Array, box: Hyperslab) -> Take:
    """Return what puts small boxes into the array that holds `box`, cast if need be."""

    def take(small: Hyperslab, piece: Array) -> None:
        common = small.intersect(box)
        if common is not None:
            part = piece[common.relative_to(small).slices()]
            target[common.relative_to(box).slices()] = part

    return take


def target_of(array: Array) -> Target:
    """Return what takes the bytes of an array as they are read, in order."""
    if array.flags.c_contiguous:
        return bytes_of(array)
    box = whole(array.shape)
    return InBoxes(box, array.dtype, placing(array, box))
