"""The messages by which ranks agree on a layout: to the owners of keys and back; pure.

A rank describes each of its arrays to the owner of the key. The owner checks what all
holders say of it, and answers each who writes what.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mpickpt.planning.layout import (
    ArrayLayout,
    HeldArray,
    HolderAnswer,
    answer_for,
    owner_of,
)
from mpickpt.planning.layout_wire import pack_answers, pack_held, unpack_held
from mpickpt.planning.resolve import resolve_array


def descriptions(held: Sequence[HeldArray], size: int) -> dict[int, bytes]:
    """Return what a rank tells each owner of its arrays."""
    outgoing: defaultdict[int, list[HeldArray]] = defaultdict(list)
    for array in held:
        outgoing[owner_of(array.key, size)].append(array)
    return {owner: pack_held(arrays) for owner, arrays in outgoing.items()}


def resolved_keys(arrived: Mapping[int, bytes]) -> list[ArrayLayout]:
    """Return the layouts of the keys that ranks described to their owner.

    Raises
    ------
    LayoutError
        The descriptions of some array do not fit together.
    """
    by_key: defaultdict[str, list[tuple[int, HeldArray]]] = defaultdict(list)
    for rank, packed in arrived.items():
        for array in unpack_held(packed):
            by_key[array.key].append((rank, array))
    return [resolve_array(key, held) for key, held in sorted(by_key.items())]


def answers_to_holders(layouts: Sequence[ArrayLayout]) -> dict[int, bytes]:
    """Return what an owner answers to each rank that holds something of its keys."""
    outgoing: defaultdict[int, list[HolderAnswer]] = defaultdict(list)
    for layout in layouts:
        for rank in layout.held:
            outgoing[rank].append(answer_for(layout, rank))
    return {rank: pack_answers(answers) for rank, answers in outgoing.items()}
