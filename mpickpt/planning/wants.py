"""Which arrays a load has to fetch, and the targets they go to; reads nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from mpickpt.errors import LayoutError, ManifestError
from mpickpt.format.dtypes import dtype_name, parse_dtype
from mpickpt.format.hyperslab import Hyperslab, even_block, whole
from mpickpt.format.tree import Key, SavedLeaf
from mpickpt.planning.flatten import HeldLeaf, shown
from mpickpt.planning.rebuild import Build, placed, wrapped
from mpickpt.planning.tree_walk import Path, below
from mpickpt.state import ArraySpec

Array = np.ndarray[Any, Any]
Target = tuple[Hyperslab, Array]


class Rules(msgspec.Struct, frozen=True):
    """The ways out that the caller of a load chose."""

    selected: Callable[[str], bool]
    keep_missing: bool = False
    cast: bool = False


class Place(msgspec.Struct, frozen=True):
    """Where the walk stands.

    Attributes
    ----------
    key, path
        Of the entry, in the tree that is wanted.
    source : int or None
        Saved rank from which per-rank values come.
    scoped : bool
        Inside a wrapper, which is going to wrap what is built here.
    per_rank : bool
        Inside `PerRank`: what was saved may replace what the program has.
    loose : bool
        Inside a live object, which decides itself what it takes.
    must_agree : bool
        Per-rank arrays have to be equal on all saved ranks.
    may_lack, loaded_only : bool
        Inside a live object that says so; see `LiveRules`.
    """

    key: str = ""
    path: Path = ()
    source: int | None = None
    scoped: bool = False
    per_rank: bool = False
    loose: bool = False
    must_agree: bool = False
    may_lack: bool = False
    loaded_only: bool = False

    def below(self, component: Key) -> "Place":
        """Return the place of a child."""
        path = (*self.path, component)
        return msgspec.structs.replace(self, key=below(self.key, component), path=path)

    def but(self, **changes: Any) -> "Place":
        """Return the place with some attributes changed."""
        return msgspec.structs.replace(self, **changes)


class Want:
    """One array to be fetched: which, from where, and the targets to fill.

    Attributes
    ----------
    key : str
        Key under which it was saved.
    dtype : str
        Element type as saved; a target may have another where it is cast.
    source : int or None
        Saved rank, for a per-rank array.
    targets : list of (Hyperslab, array)
        Boxes in the index space of the global array, and the arrays to fill.
    block : bool
        The box is a block of consecutive rows whose offset ranks must agree on.
    must_agree : bool
        The array has to be equal on all saved ranks.
    """

    __slots__ = ("block", "dtype", "key", "must_agree", "source", "targets")

    def __init__(self, saved: SavedLeaf, targets: list[Target], place: Place) -> None:
        own = saved.kind == "per_rank"
        self.key = saved.key
        self.dtype = saved.dtype
        self.source = place.source if own else None
        self.targets = targets
        self.block = False
        self.must_agree = own and place.must_agree


class WantList:
    """Collects the arrays that one rank has to fetch.

    Parameters
    ----------
    rank, size : int
        This rank and the present world size.
    held : mapping of str to boxes, or None
        Boxes that this rank held at save, where it must hold the same now; None
        where any box may be wanted.
    saved_size : int
        Number of ranks that saved.
    cast : bool
        Whether dtypes may differ.
    budget_nbytes : int
        Bytes that lie in the checkpoint: more is never allocated.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        held: Mapping[str, tuple[Hyperslab, ...]] | None,
        saved_size: int,
        cast: bool,
        budget_nbytes: int,
    ) -> None:
        self.rank = rank
        self.size = size
        self.held = held
        self.saved_size = saved_size
        self.cast = cast
        self.budget_nbytes = budget_nbytes
        self.wants: list[Want] = []
        self.moved: list[str] = []

    def as_saved(self, saved: SavedLeaf, place: Place) -> Build:
        """Want an array as it was saved, in arrays that are allocated here."""
        place = self._with_source(saved, place)
        dtype = parse_dtype(saved.dtype)
        targets = [
            (box, self._allocate(box.shape, dtype, saved))
            for box in self._boxes_as_saved(saved)
        ]
        self.wants.append(Want(saved, targets, place))
        bare = place.scoped or (saved.bare and self.size == 1)
        return lambda: wrapped(saved.kind, placed(targets), saved.shape, bare, dtype)

    def in_place(self, saved: SavedLeaf, leaf: HeldLeaf, place: Place) -> Build:
        """Want an array in the one that the program has.

        Raises
        ------
        LayoutError
            Shape, dtype or kind differ, or the array is read-only.
        """
        self._require_dtype(saved, leaf, place)
        if "per_rank" in (saved.kind, leaf.kind):
            return self._own_array(saved, leaf, place)
        return self._global_array(saved, leaf, place)

    def _own_array(self, saved: SavedLeaf, leaf: HeldLeaf, place: Place) -> Build:
        if saved.kind != leaf.kind and not (saved.bare or leaf.bare):
            raise LayoutError(
                f"{shown(place.key)!r} was saved as {saved.kind}, the program has it "
                f"as {leaf.kind}; a per-rank array is not part of a global one",
                key=shown(place.key),
            )
        place = self._with_source(saved, place)
        target = leaf.boxes[0][1]
        if isinstance(target, ArraySpec) or tuple(target.shape) != saved.shape:
            target = self._allocate(saved.shape, leaf.dtype, saved)
        _require_writable(target, place)
        self.wants.append(Want(saved, [(whole(saved.shape), target)], place))
        bare = place.scoped or leaf.bare
        return lambda: wrapped("per_rank", (((), target),), None, bare)

    def _global_array(self, saved: SavedLeaf, leaf: HeldLeaf, place: Place) -> Build:
        targets = []
        boxes = self._boxes_wanted(saved, leaf, place)
        for box, (_, array) in zip(boxes, leaf.boxes, strict=True):
            if isinstance(array, ArraySpec):
                array = self._allocate(box.shape, array.dtype, saved)
            _require_writable(array, place)
            targets.append((box, array))
        want = Want(saved, targets, place)
        want.block = leaf.global_shape is None and self.held is None
        self.wants.append(want)
        bare = place.scoped or leaf.bare
        dtype = parse_dtype(saved.dtype) if leaf.dtype is None else leaf.dtype
        return lambda: wrapped(
            leaf.kind, placed(want.targets), saved.shape, bare, dtype
        )

    def _boxes_as_saved(self, saved: SavedLeaf) -> tuple[Hyperslab, ...]:
        if saved.kind != "sharded":
            return (whole(saved.shape),)
        if self.held is not None:
            return self.held[saved.key]
        block = even_block(saved.shape, self.rank, self.size)
        return () if block is None else (block,)

    def _boxes_wanted(
        self, saved: SavedLeaf, leaf: HeldLeaf, place: Place
    ) -> list[Hyperslab]:
        boxes = [Hyperslab(offset, tuple(a.shape)) for offset, a in leaf.boxes]
        shape = leaf.global_shape
        if shape is None:
            shape = (*saved.shape[:1], *boxes[0].shape[1:])
        if shape != saved.shape:
            raise LayoutError(
                f"{shown(place.key)!r} was saved with the global shape {saved.shape}, "
                f"the program wants {tuple(shape)}; shapes do not change in a load",
                key=shown(place.key),
            )
        if self.held is None:
            return boxes
        return self._boxes_as_held(self.held.get(saved.key, ()), boxes, leaf, place)

    def _boxes_as_held(
        self,
        held: Sequence[Hyperslab],
        boxes: list[Hyperslab],
        leaf: HeldLeaf,
        place: Place,
    ) -> list[Hyperslab]:
        """Return the boxes; note the key where they are not those held at save."""
        if leaf.global_shape is None and len(held) == 1:
            # A consecutive block has no offset of its own: it takes the saved one.
            boxes = [Hyperslab(held[0].offset, boxes[0].shape)]
        full = [box for box in held if not box.is_empty]
        wanted = [box for box in boxes if not box.is_empty]
        if set(full) != set(wanted):
            self.moved.append(shown(place.key))
        return boxes

    def _require_dtype(self, saved: SavedLeaf, leaf: HeldLeaf, place: Place) -> None:
        if leaf.dtype is None or self.cast or dtype_name(leaf.dtype) == saved.dtype:
            return
        raise LayoutError(
            f"{shown(place.key)!r} was saved as {saved.dtype}, the program has "
            f"{dtype_name(leaf.dtype)}; pass cast=True to convert",
            key=shown(place.key),
        )

    def _with_source(self, saved: SavedLeaf, place: Place) -> Place:
        """Return the place with a source, for a per-rank array that has none yet."""
        if saved.kind != "per_rank" or place.source is not None:
            return place
        if self.saved_size == self.size:
            return place.but(source=self.rank)
        return place.but(source=0, must_agree=True)

    def _allocate(self, shape: tuple[int, ...], dtype: Any, saved: SavedLeaf) -> Array:
        itemsize = parse_dtype(saved.dtype).itemsize
        self.budget_nbytes -= whole(shape).size * itemsize
        if self.budget_nbytes < 0:
            raise ManifestError(
                f"{saved.key!r} claims shape {saved.shape} of {saved.dtype}, which is "
                "more than the checkpoint's files hold; it was not written by mpickpt"
            )
        return np.empty(shape, dtype)


def _require_writable(array: Array, place: Place) -> None:
    if not array.flags.writeable:
        raise LayoutError(
            f"{shown(place.key)!r}: the array in `like` is read-only, so it cannot be "
            "filled in place; give a writable one, or Sharded.spec or AsSaved",
            key=shown(place.key),
        )
