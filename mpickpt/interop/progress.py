"""Tells how much of a source has been read while a save reads it; knows no source."""

import dataclasses
from collections.abc import Callable
from typing import Any

from mpickpt.state import Sharded, StreamedArray

# Called, from the thread that writes, with the bytes just read and those of all.
Progress = Callable[[int, int], None]


def watched(state: Any, progress: Progress | None) -> Any:
    """Return a state whose streamed arrays tell how they are read.

    Parameters
    ----------
    state : object
        What one rank is going to save: dicts, lists, `Sharded`, plain values.
    progress : callable, optional
        Gets (bytes just read, bytes of all that this rank reads).
    """
    return state if progress is None else _Watch(progress).tree(state)


class _Watch:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._total = 0

    def tree(self, value: Any) -> Any:
        if type(value) is dict:
            return {key: self.tree(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.tree, value))
        if isinstance(value, Sharded) and value.boxes is not None:
            boxes = tuple((at, self._piece(piece)) for at, piece in value.boxes)
            return dataclasses.replace(value, boxes=boxes)
        return value

    def tell(self, nbytes: int) -> None:
        self._progress(nbytes, self._total)

    def _piece(self, piece: Any) -> Any:
        if not isinstance(piece, StreamedArray):
            return piece
        self._total += piece.nbytes
        return _Watched(piece, self.tell)


class _Watched(StreamedArray):
    """A streamed array that tells of the bytes that were read of it."""

    def __init__(self, elements: StreamedArray, tell: Callable[[int], None]) -> None:
        self.shape, self.dtype = elements.shape, elements.dtype
        self._elements = elements
        self._tell = tell

    def read(self, box: tuple[slice, ...]) -> Any:
        found = self._elements.read(box)
        self._tell(found.nbytes)
        return found
