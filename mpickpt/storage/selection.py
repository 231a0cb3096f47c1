"""Turns numpy's indices into boxes and their places; pure functions, no I/O."""

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpickpt.format.hyperslab import Hyperslab

Array = np.ndarray[Any, Any]
Axis = range | Array

_REVERSED = slice(None, None, -1)
_LEGAL = "use ints, slices, ..., or a list of ints or bools along one axis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which elements of an array are wanted.

    Attributes
    ----------
    axes : tuple of (range or ndarray of int)
        Wanted indices along each axis; ranges ascend.
    finish : tuple
        Index that turns the array of these elements into what was asked for: drops
        the axes that were given one int, reverses those with a negative step.
    """

    axes: tuple[Axis, ...]
    finish: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of indices on each axis, before `finish`."""
        return tuple(map(len, self.axes))

    @property
    def box(self) -> Hyperslab:
        """The smallest box that holds all wanted elements."""
        if 0 in self.shape:
            return Hyperslab((0,) * len(self.axes), self.shape)
        bounds = [_bounds(axis) for axis in self.axes]
        return Hyperslab(
            tuple(first for first, _ in bounds),
            tuple(last + 1 - first for first, last in bounds),
        )

    def within(self, box: Hyperslab) -> "Overlap | None":
        """Return where the wanted elements that lie in a box are, if there are any."""
        source, target = [], []
        for axis, start, stop in zip(self.axes, box.offset, box.stop, strict=True):
            hit = _hits(axis, start, stop)
            if hit is None:
                return None
            source.append(hit[0])
            target.append(hit[1])
        return Overlap(source=tuple(source), target=tuple(target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The wanted elements in one box: indices into the box, and into the result."""

    source: tuple[Any, ...]
    target: tuple[Any, ...]

    @property
    def corners(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lowest and the highest index into the box, on each axis."""
        bounds = [_bounds(_as_axis(index)) for index in self.source]
        return tuple(low for low, _ in bounds), tuple(high for _, high in bounds)


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """Return the selection that an index makes of an array of this shape.

    Raises
    ------
    IndexError
        An int outside its axis, or more indices than axes.
    TypeError
        An index of another kind.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    n_missing = len(shape) - sum(item is not Ellipsis for item in items)
    n_ellipses = sum(item is Ellipsis for item in items)
    if n_missing < 0 or n_ellipses > 1:
        raise IndexError(f"{len(items)} indices for an array of {len(shape)} axes")
    if not n_ellipses:
        items.append(Ellipsis)
    place = next(i for i, item in enumerate(items) if item is Ellipsis)
    items[place : place + 1] = [slice(None)] * n_missing
    chosen = [_along(item, n) for item, n in zip(items, shape, strict=True)]
    axes = tuple(axis for axis, _ in chosen)
    finish = tuple(step for _, step in chosen)
    _refuse_mixed(axes, finish)
    # numpy gives a scalar for x[0], but an array for x[0, ...].
    return Selection(axes=axes, finish=finish + (Ellipsis,) * n_ellipses)


def _along(item: Any, length: int) -> tuple[Axis, Any]:
    """Return the wanted indices along one axis, ascending, and how to finish."""
    if isinstance(item, slice):
        wanted = range(length)[item]
        return (wanted, slice(None)) if wanted.step > 0 else (wanted[::-1], _REVERSED)
    if item is None or isinstance(item, bool | np.bool_):
        raise TypeError(f"{item!r} cannot index an array in a checkpoint: {_LEGAL}")
    if isinstance(item, list | np.ndarray) and np.ndim(item) > 0:
        return _listed(item, length), slice(None)
    try:
        position = operator.index(item)
    except TypeError as error:
        raise TypeError(
            f"{type(item).__name__} cannot index an array in a checkpoint: {_LEGAL}"
        ) from error
    if not -length <= position < length:
        raise IndexError(f"index {position} is out of an axis of {length} elements")
    position %= length
    return range(position, position + 1), 0


def _listed(item: Any, length: int) -> Array:
    wanted = np.asarray(item) if len(item) else np.empty(0, np.intp)
    if wanted.ndim != 1 or wanted.dtype.kind not in "biu":
        raise TypeError(
            f"an index array of {wanted.ndim} axes and dtype {wanted.dtype}: {_LEGAL}"
        )
    if wanted.dtype == bool:
        if len(wanted) != length:
            raise IndexError(f"{len(wanted)} bools for an axis of {length} elements")
        return np.flatnonzero(wanted)
    if len(wanted) and not (-length <= wanted.min() and wanted.max() < length):
        raise IndexError(f"an index is out of an axis of {length} elements")
    wanted = wanted.astype(np.intp)
    return np.where(wanted < 0, wanted + length, wanted)


def _refuse_mixed(axes: tuple[Axis, ...], finish: tuple[Any, ...]) -> None:
    n_lists = sum(isinstance(axis, np.ndarray) for axis in axes)
    if n_lists > 1 or (n_lists == 1 and 0 in finish):
        raise TypeError(f"a list beside another list or an int: {_LEGAL}")


def _bounds(axis: Axis) -> tuple[int, int]:
    if isinstance(axis, range):
        return axis[0], axis[-1]
    return int(axis.min()), int(axis.max())


def _as_axis(index: Any) -> Axis:
    if isinstance(index, slice):
        return range(index.start, index.stop, index.step)
    array: Array = index
    return array


def _hits(axis: Axis, start: int, stop: int) -> tuple[Any, Any] | None:
    """Return which indices of an axis lie in [start, stop): there, and in the axis."""
    if isinstance(axis, range):
        first = max(0, -(-(start - axis.start) // axis.step))
        last = min(len(axis), -(-(stop - axis.start) // axis.step))
        if first >= last:
            return None
        low = axis[first] - start
        high = axis[last - 1] - start + 1
        return slice(low, high, axis.step), slice(first, last)
    places = np.flatnonzero((axis >= start) & (axis < stop))
    return (axis[places] - start, places) if len(places) else None
