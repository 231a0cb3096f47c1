"""Does box arithmetic in the index space of an array; touches nothing."""

import math
from collections.abc import Iterator
from itertools import product
from types import EllipsisType

import msgspec


# A layout has hundreds of thousands: a struct is made in a fifth of the time of a
# dataclass, and the garbage collector need not look at it.
class Hyperslab(msgspec.Struct, frozen=True, gc=False):
    """A box of an array: where it starts and how far it reaches.

    Parameters
    ----------
    offset : tuple of int
        First index on each axis, in the index space of the array.
    shape : tuple of int
        Elements on each axis; 0 is legal and makes the box empty.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements; 1 for a box without axes."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """First index after the box on each axis."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        """Whether the box holds no element."""
        return 0 in self.shape

    def contains(self, other: "Hyperslab") -> bool:
        """Tell whether `other` lies within this box, edges included."""
        return all(
            low <= first and last <= high
            for low, first, last, high in zip(
                self.offset, other.offset, other.stop, self.stop, strict=True
            )
        )

    def intersect(self, other: "Hyperslab") -> "Hyperslab | None":
        """Return the box that both cover, or None when they share no element."""
        offset = tuple(map(max, zip(self.offset, other.offset, strict=True)))
        stop = tuple(map(min, zip(self.stop, other.stop, strict=True)))
        shape = tuple(high - low for low, high in zip(offset, stop, strict=True))
        if any(n <= 0 for n in shape):
            return None
        return Hyperslab(offset, shape)

    def relative_to(self, other: "Hyperslab") -> "Hyperslab":
        """Return this box in an index space that starts at the offset of `other`."""
        pairs = zip(self.offset, other.offset, strict=True)
        return Hyperslab(tuple(own - origin for own, origin in pairs), self.shape)

    def slices(self) -> tuple[slice | EllipsisType, ...]:
        """Return the index that selects this box from an array, as a view."""
        # Indexing a 0-d array by () gives a scalar, which is a copy; by ... a view.
        return tuple(map(slice, self.offset, self.stop)) or (...,)


def whole(shape: tuple[int, ...]) -> Hyperslab:
    """Return the box that covers an array of that shape."""
    return Hyperslab((0,) * len(shape), tuple(shape))


def even_block(shape: tuple[int, ...], index: int, count: int) -> Hyperslab | None:
    """Return block `index` of an array cut in `count` even blocks along axis 0.

    Parameters
    ----------
    shape : tuple of int
        Shape (N_0, ..., N_{d-1}) of the global array.
    index : int
        Which block, 0 <= index < count.
    count : int
        Number of blocks; the first N_0 % count of them are one row longer.

    Returns
    -------
    Hyperslab or None
        Empty when there are more blocks than rows. An array without axes cannot
        be cut: block 0 has all of it, the others are None.
    """
    if not shape:
        return whole(()) if index == 0 else None
    first, last = _even_range(shape[0], index, count)
    inner = shape[1:]
    return Hyperslab((first, *(0 for _ in inner)), (last - first, *inner))


def split_rows(box: Hyperslab, count: int) -> list[Hyperslab]:
    """Cut a box in at most `count` even, non-empty boxes along axis 0.

    A box without axes stays whole; an empty box gives an empty list.
    """
    if box.is_empty:
        return []
    if not box.shape:
        return [box]
    rows, *inner = box.shape
    start, *inner_start = box.offset
    parts = min(count, rows)
    ranges = (_even_range(rows, part, parts) for part in range(parts))
    return [
        Hyperslab((start + first, *inner_start), (last - first, *inner))
        for first, last in ranges
    ]


def row_part(box: Hyperslab, index: int, count: int) -> Hyperslab | None:
    """Return box `index` of those that `split_rows` cuts; None where it has none."""
    if box.is_empty:
        return None
    if not box.shape:
        return box if index == 0 else None
    rows, *inner = box.shape
    parts = min(count, rows)
    if index >= parts:
        return None
    start, *inner_start = box.offset
    first, last = _even_range(rows, index, parts)
    return Hyperslab((start + first, *inner_start), (last - first, *inner))


def contiguous_pieces(
    shape: tuple[int, ...], itemsize: int, max_nbytes: int
) -> Iterator[Hyperslab]:
    """Yield boxes in C order that tile an array, each one a single run of memory.

    Parameters
    ----------
    shape : tuple of int
        Shape of a C-ordered array; nothing is yielded when it has no element.
    itemsize : int
        Bytes of one element.
    max_nbytes : int
        Upper bound for each box, which always holds at least one element.

    Yields
    ------
    Hyperslab
        One range along one axis; single indices before that axis, whole axes after.
    """
    if 0 in shape:
        return
    if not shape:
        yield whole(())
        return
    limit = max(1, max_nbytes // itemsize)
    axis = 0
    while math.prod(shape[axis + 1 :]) > limit:
        axis += 1
    inner = shape[axis + 1 :]
    rows = limit // math.prod(inner)
    for outer in product(*map(range, shape[:axis])):
        for first in range(0, shape[axis], rows):
            length = min(rows, shape[axis] - first)
            yield Hyperslab(
                (*outer, first, *(0 for _ in inner)),
                (*(1 for _ in outer), length, *inner),
            )


def _even_range(length: int, index: int, count: int) -> tuple[int, int]:
    short, longer = divmod(length, count)
    first = index * short + min(index, longer)
    return first, first + short + (index < longer)
