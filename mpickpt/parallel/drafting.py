"""Drafts one rank's shard from its described state, keeping what does not change."""

from dataclasses import dataclass, replace

from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.hyperslab import whole
from mpickpt.parallel.describe import Description, SaveMemory, written_parts
from mpickpt.parallel.layout_exchange import Resolved
from mpickpt.planning.flatten import FlatState, HeldLeaf
from mpickpt.storage.shard_draft import DraftArray, ShardDraft, draft_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What the first half of a save gives to the second.

    Attributes
    ----------
    description : Description
        The state and its agreed layout.
    draft : ShardDraft
        This rank's shard.
    """

    description: Description
    draft: ShardDraft

    def without_arrays(self) -> "Drafted":
        """Return what is left to know once the arrays were copied.

        So that the program's own arrays, where it makes new ones at each step, live
        no longer for being saved.
        """
        flat = FlatState(self.description.flat.tree, ())
        return replace(
            self,
            description=replace(self.description, flat=flat),
            draft=replace(self.draft, parts=()),
        )


def draft(
    description: Description, memory: SaveMemory, *, rank: int, world_size: int
) -> ShardDraft:
    """Return this rank's shard, ready to be streamed or staged.

    Parameters
    ----------
    description : Description
        The state and its agreed layout.
    memory : SaveMemory
        Keeps the layout of the shard for the next save.
    rank, world_size : int
        This rank and the number of ranks.
    """
    leaves = description.flat.leaves
    shapes = tuple(_shape(leaf) for leaf in leaves if leaf.kind == "per_rank")
    made_for = (description.resolved.digest, shapes)
    if memory.shard is not None and memory.shard_made_for == made_for:
        arrays = memory.shard.arrays
    else:
        arrays = tuple(_draft_array(leaf, description.resolved) for leaf in leaves)
    made = draft_shard(
        description.flat.tree,
        arrays,
        [[array for _, array in leaf.boxes] for leaf in leaves],
        rank=rank,
        world_size=world_size,
        known=memory.shard,
    )
    memory.shard, memory.shard_made_for = made.layout, made_for
    return made


def _draft_array(leaf: HeldLeaf, resolved: Resolved) -> DraftArray:
    answer = resolved.answers[leaf.key]
    own = leaf.kind == "per_rank"
    shape = _shape(leaf) if own else answer.global_shape
    assert shape is not None
    return DraftArray(
        key=leaf.key,
        kind=leaf.kind,
        dtype=leaf.dtype or parse_dtype(answer.dtype),
        shape=shape,
        boxes=(whole(shape),) if own else tuple(box for box, _ in answer.boxes),
        parts=written_parts(leaf, resolved),
        bare=leaf.bare,
    )


def _shape(leaf: HeldLeaf) -> tuple[int, ...]:
    """Return the shape of a per-rank array."""
    return tuple(leaf.boxes[0][1].shape)
