"""The words in which a program says whose each array is; touches nothing.

A state is a tree of dicts, lists and tuples. Plain Python values stay bare. An
array is wrapped, so that another number of ranks can load it: `Sharded` (this
rank's box of a global array), `Replicated` (equal on all ranks) or `PerRank`.
A wrapper takes one array or a whole subtree.
"""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Shape = tuple[int, ...]
Check = Literal["rotate", "full", "off"]
ResizeRule = (
    Literal["error", "keep", "first", "modulo"]
    | Callable[[Sequence[Any], int, int], Any]
)

CHECKS = ("rotate", "full", "off")
RESIZE_RULES = ("error", "keep", "first", "modulo")


class AsSaved:
    """Stand in a `like` tree for whatever was saved there.

    The library allocates the arrays. Use the class itself or an instance.
    """


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Describe an array that the library allocates at load.

    Parameters
    ----------
    shape : tuple of int
        Shape of the local array, in elements.
    dtype : dtype-like
        Its element type.
    """

    shape: Shape
    dtype: Any


class StreamedArray(ABC):
    """An array whose elements are read only when a save writes them.

    So a state may be larger than memory: one that is copied from elsewhere. Subclasses
    set `shape` and `dtype` and say how a box is read. It stands wherever a wrapper
    takes an array; a load gives ordinary arrays.

    Attributes
    ----------
    shape : tuple of int
        Shape of the array, in elements.
    dtype : numpy.dtype
        Its element type.

    Notes
    -----
    `read` is called from the thread that digests the shard, which is not the caller's
    in an asynchronous or background save. What it raises fails the save on all ranks.
    """

    shape: Shape
    dtype: Any

    @abstractmethod
    def read(self, box: tuple[slice, ...]) -> Any:
        """Return the elements of a box.

        Parameters
        ----------
        box : tuple of slice
            Start and stop on each axis, inside the array; () for a 0-d array.
            Boxes come in C order, each of at most 1 MiB, or one element.

        Returns
        -------
        ndarray
            Of `dtype`, with the shape of the box.
        """

    @property
    def nbytes(self) -> int:
        """Size of all elements, in bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def __getitem__(self, box: Any) -> "StreamedArray":
        bounds = () if box == (...,) else box
        return _StreamedBox(self, tuple(bounds))


class _StreamedBox(StreamedArray):
    """A box of a streamed array; nothing is read until the save asks for it."""

    def __init__(self, whole: StreamedArray, bounds: tuple[slice, ...]) -> None:
        self._whole = whole
        self._starts = tuple(bound.start for bound in bounds)
        self.shape = tuple(bound.stop - bound.start for bound in bounds)
        self.dtype = whole.dtype

    def read(self, box: tuple[slice, ...]) -> Any:
        pairs = zip(self._starts, box, strict=True)
        moved = (slice(at + part.start, at + part.stop) for at, part in pairs)
        return self._whole.read(tuple(moved))


@dataclass(frozen=True, slots=True, eq=False)
class Sharded:
    """Mark data as this rank's box of a global array.

    Parameters
    ----------
    data : array, or a subtree of arrays of one shape
        This rank's elements, shape (n_0, ..., n_{d-1}).
    global_shape : tuple of int
        Shape of the whole array, (N_0, ..., N_{d-1}).
    offset : tuple of int
        First index of this rank's box in the global array.

    Attributes
    ----------
    boxes : tuple of (offset, array), or None
        The boxes of a rank that holds several, or none; see `pieces`.

    Notes
    -----
    Several ranks may hold the same box: they are replicas, and it is stored once.
    Boxes that overlap otherwise or leave a gap are a `LayoutError` at save.
    """

    data: Any
    global_shape: Shape | None = None
    offset: Shape | None = None
    boxes: tuple[tuple[Shape, Any], ...] | None = None
    dtype: Any = None
    consecutive: bool = False

    def __post_init__(self) -> None:
        placed = self.global_shape is not None and (
            self.offset is not None or self.boxes is not None
        )
        if not placed and not self.consecutive:
            raise TypeError(
                "Sharded needs global_shape and offset; for consecutive blocks "
                "along axis 0 use Sharded.block(array)"
            )
        object.__setattr__(self, "global_shape", _shape(self.global_shape))
        object.__setattr__(self, "offset", _shape(self.offset))

    @classmethod
    def block(cls, data: Any) -> "Sharded":
        """Mark data as this rank's block of consecutive rows, in rank order.

        Parameters
        ----------
        data : array, or a subtree of arrays
            This rank's rows, shape (n, N_1, ..., N_{d-1}); n may differ between
            ranks and may be 0. Offset and total are agreed at save.
        """
        return cls(data, consecutive=True)

    @classmethod
    def pieces(
        cls,
        pieces: Iterable[tuple[Sequence[int] | int, Any]],
        *,
        global_shape: Sequence[int],
        dtype: Any = None,
    ) -> "Sharded":
        """Mark several boxes, or none, as this rank's part of a global array.

        Parameters
        ----------
        pieces : iterable of (offset, array)
            First index of each box in the global array, and its elements.
        global_shape : tuple of int
            Shape of the whole array.
        dtype : dtype-like, optional
            Element type, for the case that no rank has a piece.
        """
        boxes = tuple((_index(offset), array) for offset, array in pieces)
        return cls(None, _index(global_shape), None, boxes, dtype)

    @classmethod
    def spec(
        cls,
        shape: Sequence[int],
        global_shape: Sequence[int],
        offset: Sequence[int],
        dtype: Any,
    ) -> "Sharded":
        """Ask, in a `like` tree, for a box that the library allocates.

        Parameters
        ----------
        shape : tuple of int
            Shape of the box wanted here.
        global_shape, offset : tuple of int
            As in `Sharded`.
        dtype : dtype-like
            Element type expected.
        """
        return cls(
            ArraySpec(_index(shape), dtype), _index(global_shape), _index(offset)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Replicated:
    """Mark data as equal on all ranks: stored once, given to every rank.

    Parameters
    ----------
    data : array, plain value, or a subtree of them
        The value, the same on every rank that has this key.
    check : {"rotate", "full", "off"}
        How divergence is looked for at each save. "rotate": every rank digests
        the part that one rank writes, another part at each save, at 1/size of
        the cost of "full".
    """

    data: Any
    check: Check = "rotate"

    def __post_init__(self) -> None:
        if self.check not in CHECKS:
            raise ValueError(f"Replicated check {self.check!r} is not one of {CHECKS}")


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """Mark data as this rank's own.

    Parameters
    ----------
    data : array, plain value, live object, or a subtree of them
        The value; shapes may differ between ranks.
    on_resize : {"error", "keep", "first", "modulo"} or callable
        What a load on another number of ranks does. "error": refuse, unless the
        values are equal on all saved ranks. "keep": leave what this rank has.
        "first": everyone takes rank 0's. "modulo": rank r takes that of saved rank
        r % P. A callable ``f(saved, rank, size)`` returns the value; `saved` is a
        lazy sequence over the saved ranks.

    Notes
    -----
    "first" and "modulo" give several ranks *equal random streams* where the value
    is a generator and the world grew: their draws are then the same numbers.
    """

    data: Any
    on_resize: ResizeRule = "error"

    def __post_init__(self) -> None:
        if not callable(self.on_resize) and self.on_resize not in RESIZE_RULES:
            raise ValueError(
                f"PerRank on_resize {self.on_resize!r} is neither one of "
                f"{RESIZE_RULES} nor a callable"
            )


def _index(value: Sequence[int] | int) -> Shape:
    # Numpy's integers are no int; a float would be cut off to the wrong box.
    items = value if isinstance(value, Iterable) else (value,)
    return tuple(operator.index(n) for n in items)


def _shape(value: Sequence[int] | None) -> Shape | None:
    return None if value is None else _index(value)
