"""Simulates the ranks of a large job in one process, with the planning code that ships.

Every message between two simulated ranks is packed, routed and unpacked as between
two real ones; nothing is sent. Functions are pure: the same sizes, the same result.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import isqrt

from mpickpt.format.hyperslab import Hyperslab, even_block, whole
from mpickpt.format.manifest import ArrayRecord, ShardManifest, ShardRecord
from mpickpt.format.naming import shard_path
from mpickpt.planning.layout import HeldArray, HolderAnswer
from mpickpt.planning.layout_rounds import (
    answers_to_holders,
    descriptions,
    resolved_keys,
)
from mpickpt.planning.layout_wire import unpack_answers
from mpickpt.planning.load_plan import assign_shards
from mpickpt.planning.matching import answered
from mpickpt.planning.matching_wire import (
    Sending,
    StoredItem,
    WantedItem,
    announcements,
    answer_of,
)

COLUMNS = 64
CHECKPOINT_ID = "3f2a91c0" * 4

Mail = dict[int, dict[int, bytes]]


def key_of_array(array: int) -> str:
    """Return the key of an array of the simulated state."""
    return f"model/layers/{array}/weight"


def shape_of(array: int, rows: int) -> tuple[int, int]:
    """Return the global shape of an array: no two alike, no even split."""
    return (rows + 7 + array, COLUMNS)


def grid_box(shape: tuple[int, int], index: int, count: int) -> Hyperslab:
    """Return box `index` of an array cut along both axes, as square as `count` lets."""
    across = next(n for n in range(isqrt(count), 0, -1) if count % n == 0)
    rows = even_block(shape, index // across, count // across)
    columns = even_block(shape[::-1], index % across, across)
    assert rows is not None and columns is not None
    return Hyperslab(
        (rows.offset[0], columns.offset[0]), (rows.shape[0], columns.shape[0])
    )


def row_box(shape: tuple[int, int], index: int, count: int) -> Hyperslab:
    """Return box `index` of an array cut along axis 0."""
    box = even_block(shape, index, count)
    assert box is not None
    return box


def held_by(
    rank: int, ranks: int, arrays: Iterable[int], rows_of_rank: int = 16
) -> list[HeldArray]:
    """Return what one rank says of its arrays: one in eight replicated, else rows."""
    held = []
    for array in arrays:
        shape = shape_of(array, ranks * rows_of_rank)
        replicated = array % 8 == 7
        held.append(
            HeldArray(
                key=key_of_array(array),
                kind="replicated" if replicated else "sharded",
                dtype="float32",
                global_shape=shape,
                boxes=(whole(shape) if replicated else row_box(shape, rank, ranks),),
            )
        )
    return held


def delivered(outgoing: Mapping[int, Mapping[int, bytes]]) -> Mail:
    """Return the messages of all ranks by destination, then by source."""
    arrived: defaultdict[int, dict[int, bytes]] = defaultdict(dict)
    for source, messages in outgoing.items():
        for dest, message in messages.items():
            arrived[dest][source] = message
    return dict(arrived)


def agree_on_layout(held: Sequence[Sequence[HeldArray]]) -> list[list[HolderAnswer]]:
    """Exchange descriptions and answers between all ranks, as a save does."""
    size = len(held)
    arrived = delivered({r: descriptions(own, size) for r, own in enumerate(held)})
    answers = delivered(
        {
            owner: answers_to_holders(resolved_keys(messages))
            for owner, messages in arrived.items()
        }
    )
    return [
        [
            one
            for packed in answers.get(rank, {}).values()
            for one in unpack_answers(packed)
        ]
        for rank in range(size)
    ]


def stored_by_reader(
    saved: int, size: int, arrays: Iterable[int], rows: int
) -> list[list[StoredItem]]:
    """Return what each present rank finds in the saved ranks' shards that it reads."""
    readers = assign_shards([1] * saved, size)
    stored: list[list[StoredItem]] = [[] for _ in range(size)]
    for array, rank in product(arrays, range(saved)):
        shape = shape_of(array, rows)
        box = row_box(shape, rank, saved)
        own = stored[readers[rank]]
        own.append(
            StoredItem(
                key_of_array(array), len(own), None, shape, box.offset, box.shape
            )
        )
    return stored


def wanted_by_rank(
    size: int, arrays: Sequence[int], rows: int, box_of: object = row_box
) -> list[list[WantedItem]]:
    """Return what each present rank wants: its box of every array."""
    assert callable(box_of)
    wanted = []
    for rank in range(size):
        boxes = [box_of(shape_of(array, rows), rank, size) for array in arrays]
        wanted.append(
            [
                WantedItem(key_of_array(array), n, None, box.offset, box.shape)
                for n, (array, box) in enumerate(zip(arrays, boxes, strict=True))
                if not box.is_empty
            ]
        )
    return wanted


def announced(
    stored: Sequence[Sequence[StoredItem]], wanted: Sequence[Sequence[WantedItem]]
) -> Mail:
    """Return what arrives at the owners of keys."""
    size = len(wanted)
    pairs = enumerate(zip(stored, wanted, strict=True))
    return delivered({r: announcements(have, want, size) for r, (have, want) in pairs})


def matched(arrived: Mail, size: int) -> Mail:
    """Return what the owners answer, by the rank that is answered."""
    return delivered({owner: answered(mail, size) for owner, mail in arrived.items()})


def planned(
    stored: Sequence[Sequence[StoredItem]], wanted: Sequence[Sequence[WantedItem]]
) -> list[list[Sending]]:
    """Return what each rank sends to whom in a load, agreed as a load does."""
    size = len(wanted)
    answers = matched(announced(stored, wanted), size)
    return [
        answer_of(answers.get(rank, {}).values()).sendings() for rank in range(size)
    ]


def manifest_of(ranks: int, arrays: int) -> ShardManifest:
    """Return the manifest of a large checkpoint."""
    sha256 = "0123456789abcdef" * 4
    numel = 70_000_000_000 // ranks
    return ShardManifest(
        world_size=ranks,
        step=1234,
        wall_clock_seconds=4521.0,
        shards=tuple(
            ShardRecord(
                rank=rank,
                path=shard_path(rank, ranks, CHECKPOINT_ID),
                nbytes=14 * numel,
                sha256=sha256,
                crc32="0a1b2c3d",
                param_shard_offset=rank * numel,
                param_shard_numel=numel,
                index=(14 * numel - 65536, 65536, "0a1b2c3d"),
            )
            for rank in range(ranks)
        ),
        arrays=tuple(
            ArrayRecord(
                key=key_of_array(array),
                kind="sharded",
                dtype="float16",
                global_shape=shape_of(array, 8192),
            )
            for array in range(arrays)
        ),
        checkpoint_id=CHECKPOINT_ID,
        created_at="2026-01-31T12:00:00Z",
        writer={"mpickpt": "0.1.0", "hdf5": "2.0.0"},
        run={},
        metrics={},
        metadata={},
    )
