"""Requests that complete while their rank sleeps, and buffers that outlive them."""

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from mpickpt.parallel.line import TAG_TRANSFER, Line, keep_forever
from mpickpt.parallel.waiting import Deadline, Pause, Steps


def complete(request: Any, deadline: Deadline, *buffers: Any) -> Steps[None]:
    """Step until the request is complete; if it never is, keep its buffers for ever.

    Parameters
    ----------
    request : mpi4py.MPI.Request
    deadline : Deadline
        Checked at every step.
    *buffers
        What MPI reads or writes until then.
    """
    pause: Pause = 0.0
    completed = False
    try:
        while not request.Test():
            deadline.check()
            yield pause
            pause = None
        completed = True
    finally:
        if not completed:
            keep_forever((request, buffers))


class Transfer:
    """A message on its way; holds its buffer until the receiver has taken it."""

    __slots__ = ("__weakref__", "_buffer", "_line", "_request")

    def __init__(self, line: Line, request: Any, buffer: Any) -> None:
        self._line = line
        self._request = request
        self._buffer = buffer
        if request is not None:
            line.transfers.add(self)

    def done(self) -> bool:
        """Whether the message has arrived; returns at once."""
        if self._request is not None and self._request.Test():
            self._request = self._buffer = None
            self._line.transfers.discard(self)
        return self._request is None


class Received(Transfer):
    """A message that arrives in the caller's buffer.

    Attributes
    ----------
    source : int
        Rank that sent it.
    nbytes : int
        Its length; the buffer's first `nbytes` hold it once `done()`.
    """

    __slots__ = ("nbytes", "source")

    def __init__(
        self, line: Line, request: Any, buffer: Any, *, source: int, nbytes: int
    ) -> None:
        super().__init__(line, request, buffer)
        self.source = source
        self.nbytes = nbytes


def send(line: Line, view: Any, dest: int, tag: int) -> Transfer:
    """Begin a synchronous send."""
    if line.comm is None:
        line.loopback.setdefault(tag, deque()).append(bytes(view))
        return Transfer(line, None, None)
    request = line.comm.Issend(view, dest, TAG_TRANSFER + tag)
    return Transfer(line, request, view)


def receive(line: Line, buffer: npt.NDArray[np.uint8], tag: int) -> Received | None:
    """Begin to receive what has arrived, if anything has."""
    if line.comm is None:
        return _receive_own(line, buffer, tag)
    status = line.mpi.Status()
    message = line.comm.Improbe(line.mpi.ANY_SOURCE, TAG_TRANSFER + tag, status)
    if message is None:
        return None
    nbytes = status.Get_count(line.mpi.BYTE)
    part = buffer[:nbytes]
    request = message.Irecv(part)
    return Received(line, request, part, source=status.Get_source(), nbytes=nbytes)


def _receive_own(
    line: Line, buffer: npt.NDArray[np.uint8], tag: int
) -> Received | None:
    queue = line.loopback.get(tag)
    if not queue:
        return None
    message = np.frombuffer(queue.popleft(), dtype=np.uint8)
    buffer[: message.size] = message
    return Received(line, None, None, source=0, nbytes=message.size)
