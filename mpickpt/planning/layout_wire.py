"""Packs what ranks tell each other of a layout as MessagePack; touches nothing."""

from collections.abc import Sequence
from itertools import chain

import msgspec

from mpickpt.format.hyperslab import Hyperslab, whole
from mpickpt.format.layout_document import Ranks
from mpickpt.planning.layout import HeldArray, HolderAnswer, Shape, Share, sole
from mpickpt.planning.rank_grid import Holders, RankGrid


def pack_held(held: Sequence[HeldArray]) -> bytes:
    """Return the descriptions of one rank as MessagePack."""
    return msgspec.msgpack.encode(
        [
            (
                one.key,
                one.kind,
                one.dtype,
                one.global_shape,
                [_box_code(box, one.global_shape) for box in one.boxes],
            )
            for one in held
        ]
    )


def unpack_held(packed: bytes) -> list[HeldArray]:
    """Return what `pack_held` was given."""
    return [
        HeldArray(
            key=key,
            kind=kind,
            dtype=dtype,
            global_shape=shape,
            boxes=tuple(_box_of(code, shape) for code in codes),
        )
        for key, kind, dtype, shape, codes in _HELD_DECODER.decode(packed)
    ]


def pack_answers(answers: Sequence[HolderAnswer]) -> bytes:
    """Return the answers to one holder as MessagePack."""
    return msgspec.msgpack.encode(
        [
            (
                one.key,
                one.dtype,
                one.global_shape,
                [
                    (_box_code(box, one.global_shape), _share_code(share))
                    for box, share in one.boxes
                ],
            )
            for one in answers
        ]
    )


def unpack_answers(packed: bytes) -> list[HolderAnswer]:
    """Return what `pack_answers` was given."""
    return [
        HolderAnswer(
            key=key,
            dtype=dtype,
            global_shape=shape,
            boxes=tuple(
                (_box_of(box, shape), _share_of(share)) for box, share in pairs
            ),
        )
        for key, dtype, shape, pairs in _ANSWER_DECODER.decode(packed)
    ]


_HELD_DECODER = msgspec.msgpack.Decoder(
    list[tuple[str, str, str | None, Shape | None, list[Shape | None]]]
)
_ANSWER_DECODER = msgspec.msgpack.Decoder(
    list[tuple[str, str, Shape | None, list[tuple[Shape | None, int | Shape]]]]
)


def _box_code(box: Hyperslab, global_shape: Shape | None) -> Shape | None:
    """Return offset and shape in one tuple, or None for the whole array."""
    if box.shape == global_shape and not any(box.offset):
        return None
    return box.offset + box.shape


def _box_of(code: Shape | None, global_shape: Shape | None) -> Hyperslab:
    if code is None:
        return whole(global_shape or ())
    ndim = len(code) // 2
    return Hyperslab(code[:ndim], code[ndim:])


def _share_code(share: Share) -> int | Shape:
    """Return a share as its only holder, as most have one, or as one flat tuple."""
    if len(share.holders) == 1:
        return share.holders[0]
    return (share.start, share.nparts, *_holders_code(share.holders))


def _share_of(code: int | Shape) -> Share:
    if isinstance(code, int):
        return sole(code)
    start, nparts, *ranks = code
    return Share(holders=_holders_of(ranks), start=start, nparts=nparts)


def _holders_code(holders: Holders) -> Shape:
    if isinstance(holders, RankGrid):
        return (2, holders.start, *chain.from_iterable(holders.axes))
    return _ranks_code(holders)


def _holders_of(code: Sequence[int]) -> Holders:
    if code[0] == 2:
        _, start, *axes = code
        return RankGrid(start, tuple(zip(axes[::2], axes[1::2], strict=True)))
    return _ranks_of(code)


def _ranks_code(ranks: Ranks) -> Shape:
    if isinstance(ranks, range):
        return (1, ranks.start, ranks.stop, ranks.step)
    return (0, *ranks)


def _ranks_of(code: Sequence[int]) -> Ranks:
    is_range, *ranks = code
    return range(*ranks) if is_range else tuple(ranks)
