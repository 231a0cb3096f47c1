"""Packs boxes for other ranks in parcels of bounded memory; no MPI here."""

import queue
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpickpt.errors import CheckpointError
from mpickpt.format.hyperslab import Hyperslab
from mpickpt.planning.box_index import BoxIndex
from mpickpt.planning.matching_wire import Sending
from mpickpt.storage.regions import bytes_of

Array = np.ndarray[Any, Any]

LARGEST_PARCEL = 2 << 20
_SMALLEST_PARCEL = 512 << 10  # a box of `regions.PIECE_NBYTES` and its record fit
_PARCELS_NBYTES = 48 << 20

_RECORD = struct.Struct("<qqq")  # item, number of axes, bytes of elements


class Parcels:
    """Packs boxes for other ranks; used by the reading thread.

    Parameters
    ----------
    n_dests : int
        Number of ranks that get anything.
    """

    def __init__(self, n_dests: int) -> None:
        share = _PARCELS_NBYTES // max(1, 2 * n_dests)
        self.nbytes = max(_SMALLEST_PARCEL, min(LARGEST_PARCEL, share))
        self._free: queue.SimpleQueue[Array] = queue.SimpleQueue()
        for _ in range(max(2, min(2 * n_dests, _PARCELS_NBYTES // self.nbytes))):
            self._free.put(np.empty(self.nbytes, np.uint8))
        self._open: OrderedDict[int, tuple[Array, int]] = OrderedDict()
        self.full: queue.SimpleQueue[tuple[int, Array, int]] = queue.SimpleQueue()
        self.cancelled = threading.Event()

    def add(self, dest: int, item: int, box: Hyperslab, elements: Array) -> None:
        """Pack one box for an item of a rank; waits while all parcels are under way."""
        content = bytes_of(np.ascontiguousarray(elements))
        numbers = box.offset + box.shape
        head = _RECORD.pack(item, box.ndim, len(content))
        head += struct.pack(f"<{len(numbers)}q", *numbers)
        length = len(head) + len(content)
        parcel, used = self._room(dest, length)
        view = parcel.data
        view[used : used + len(head)] = head
        view[used + len(head) : used + length] = content
        self._open[dest] = (parcel, used + length)

    def flush(self) -> None:
        """Hand over every parcel that is still open."""
        for dest in list(self._open):
            self._close(dest)

    def give_back(self, parcel: Array) -> None:
        """Let a parcel that was received be filled anew."""
        self._free.put(parcel)

    def _room(self, dest: int, length: int) -> tuple[Array, int]:
        if dest in self._open:
            parcel, used = self._open[dest]
            if used + length <= self.nbytes:
                return parcel, used
            self._close(dest)
        while True:
            if self._free.empty() and self._open:
                self._close(next(iter(self._open)))
            try:
                return self._free.get(timeout=0.1), 0
            except queue.Empty:
                if self.cancelled.is_set():
                    raise CheckpointError("the load was cancelled") from None

    def _close(self, dest: int) -> None:
        parcel, used = self._open.pop(dest)
        self.full.put((dest, parcel, used))


def packing(
    parcels: Parcels, sendings: Sequence[Sending]
) -> Callable[[Hyperslab, Array], None]:
    """Return what packs the common part of each small box for everyone who wants it."""
    wanted = BoxIndex([sending.box for sending in sendings])

    def take(small: Hyperslab, piece: Array) -> None:
        for number, common in wanted.meeting(small):
            sending = sendings[number]
            part = piece[common.relative_to(small).slices()]
            parcels.add(sending.dest, sending.wanted, common, part)

    return take


def boxes_in(parcel: memoryview) -> Iterator[tuple[int, Hyperslab, memoryview]]:
    """Yield item, box and bytes of the elements of all that is in a parcel."""
    place = 0
    while place < len(parcel):
        item, ndim, nbytes = _RECORD.unpack_from(parcel, place)
        place += _RECORD.size
        numbers = struct.unpack_from(f"<{2 * ndim}q", parcel, place)
        place += 16 * ndim
        yield (
            item,
            Hyperslab(numbers[:ndim], numbers[ndim:]),
            parcel[place : place + nbytes],
        )
        place += nbytes
