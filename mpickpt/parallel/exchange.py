"""Sparse all-to-all: no rank needs to know who will write to it.

Synchronous sends, matched probes, and a barrier that each rank enters once its own
messages were received (Hoefler, Siebert, Lumsdaine: NBX, 2010): the cost follows
the number of messages, not the square of the number of ranks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpickpt.parallel.line import TAG_EXCHANGE, Line, keep_forever
from mpickpt.parallel.roll_call import Patience
from mpickpt.parallel.waiting import Pause, Steps

MOST_NBYTES = 1 << 30
# A rank may have begun the next exchange while another still ends this one.
TAGS_IN_TURN = 16


def exchange_messages(
    line: Line, outgoing: Mapping[int, bytes], patience: Patience
) -> Steps[dict[int, bytes]]:
    """Send to the other ranks and return what came from them, by source."""
    for message in outgoing.values():
        if len(message) >= MOST_NBYTES:
            raise ValueError(f"a message of {len(message)} bytes: the most is 1 GiB")
    exchange = _Exchange(line, outgoing)
    completed = False
    try:
        pause: Pause = 0.0
        while not exchange.is_over():
            if exchange.moved:
                patience.progressed()
                pause = 0.0
            patience.check()
            yield pause
            pause = None
        completed = True
    finally:
        if not completed:
            keep_forever(exchange)
    return exchange.arrived()


class _Exchange:
    """The requests and buffers of one exchange."""

    def __init__(self, line: Line, outgoing: Mapping[int, bytes]) -> None:
        line.exchanges += 1
        self._line = line
        self._tag = TAG_EXCHANGE + line.exchanges % TAGS_IN_TURN
        self._outgoing = outgoing
        self._incoming: dict[int, Any] = {}
        self._receives: list[Any] = []
        self._barrier: Any = None
        self._sends = [
            line.comm.Issend(message, dest, self._tag)
            for dest, message in outgoing.items()
        ]
        self.moved = False

    def is_over(self) -> bool:
        """Move what can be moved; whether every rank has all of its messages."""
        open_before = len(self._sends) + len(self._receives)
        arrived = self._accept_all()
        self._sends = [request for request in self._sends if not request.Test()]
        self._receives = [request for request in self._receives if not request.Test()]
        still_open = len(self._sends) + len(self._receives)
        self.moved = arrived or still_open < open_before
        if self._barrier is None:
            if not self._sends:
                self._barrier = self._line.comm.Ibarrier()
            return False
        # The last messages may have come between the probe above and the barrier's
        # end, but matched ones only: a synchronous send ends when it is matched.
        return bool(self._barrier.Test()) and not self._receives

    def arrived(self) -> dict[int, bytes]:
        """Return the messages that came, by source."""
        return {rank: buffer.tobytes() for rank, buffer in self._incoming.items()}

    def _accept_all(self) -> bool:
        mpi, comm = self._line.mpi, self._line.comm
        status, before = mpi.Status(), len(self._incoming)
        while (message := comm.Improbe(mpi.ANY_SOURCE, self._tag, status)) is not None:
            buffer = np.empty(status.Get_count(mpi.BYTE), dtype=np.uint8)
            self._incoming[status.Get_source()] = buffer
            self._receives.append(message.Irecv(buffer))
        return len(self._incoming) > before
