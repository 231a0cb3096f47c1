"""Gives boxes that one rank read to all ranks, in rounds of bounded memory."""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mpickpt.format.hyperslab import Hyperslab, contiguous_pieces
from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.waiting import Steps
from mpickpt.storage.regions import bytes_of

PHASE = "broadcast"

Array = np.ndarray[Any, Any]

_ROUND_NBYTES = 8 << 20
_RECORD = struct.Struct("<qqq")  # bytes of the key, number of axes, bytes of elements


def broadcast_in_rounds(
    talk: Conversation,
    boxes: list[tuple[str, Hyperslab, Array]],
    put: Callable[[str, Hyperslab, memoryview], None],
) -> Steps[None]:
    """Give the boxes that some rank read to all ranks, reader by reader.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    boxes : list of (str, Hyperslab, ndarray)
        Key, box and elements of what this rank gives.
    put : callable
        Puts a box that another rank gave in place: key, box, bytes.
    """
    rounds = list(_packed_rounds(boxes))
    counts = yield from talk.allgather(struct.pack("<q", len(rounds)), PHASE)
    for root, packed in enumerate(counts):
        for number in range(struct.unpack("<q", packed)[0]):
            own = rounds[number]() if root == talk.rank else None
            payload = yield from talk.bcast(own, PHASE, root)
            if root != talk.rank:
                _unpack_round(payload, put)


def _packed_rounds(
    boxes: list[tuple[str, Hyperslab, Array]],
) -> list[Callable[[], bytes]]:
    """Return the rounds, each packed only when its turn comes."""
    rounds: list[list[tuple[str, Hyperslab, Array]]] = []
    room = 0
    for key, box, array in boxes:
        for small in contiguous_pieces(box.shape, array.itemsize, _ROUND_NBYTES):
            piece = array[small.slices()]
            offset = tuple(a + b for a, b in zip(small.offset, box.offset, strict=True))
            if piece.nbytes > room or not rounds:
                rounds.append([])
                room = _ROUND_NBYTES
            rounds[-1].append((key, Hyperslab(offset, small.shape), piece))
            room -= piece.nbytes
    return [partial(_pack_round, pieces) for pieces in rounds]


def _pack_round(pieces: list[tuple[str, Hyperslab, Array]]) -> bytes:
    chunks: list[Any] = []
    for key, box, piece in pieces:
        name = key.encode()
        content = bytes_of(np.ascontiguousarray(piece))
        chunks.append(_RECORD.pack(len(name), box.ndim, len(content)))
        chunks.append(struct.pack(f"<{2 * box.ndim}q", *box.offset, *box.shape))
        chunks += [name, content]
    return b"".join(chunks)


def _unpack_round(
    payload: bytes, put: Callable[[str, Hyperslab, memoryview], None]
) -> None:
    view, place = memoryview(payload), 0
    while place < len(view):
        n_name, ndim, nbytes = _RECORD.unpack_from(view, place)
        place += _RECORD.size
        numbers = struct.unpack_from(f"<{2 * ndim}q", view, place)
        place += 16 * ndim
        key = bytes(view[place : place + n_name]).decode()
        place += n_name
        put(
            key, Hyperslab(numbers[:ndim], numbers[ndim:]), view[place : place + nbytes]
        )
        place += nbytes
