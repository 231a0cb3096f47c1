"""Collectives that never hang: deadlines, and errors that all ranks raise alike."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import Event
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpickpt.errors import CollectiveTimeoutError
from mpickpt.parallel.exchange import exchange_messages
from mpickpt.parallel.heartbeat import beat
from mpickpt.parallel.line import ROOT, Line
from mpickpt.parallel.local_work import LocalWork
from mpickpt.parallel.messages import Received, Transfer, complete, receive, send
from mpickpt.parallel.roll_call import Patience, listen_now_and_then
from mpickpt.parallel.shipping import MOST_RECORDS, dump_failure, join_failures
from mpickpt.parallel.waiting import Steps

T = TypeVar("T")

ROUND_NBYTES = 1 << 29
FIRST_NBYTES = 1 << 10  # of a broadcast, with its length: answers of rank 0 fit
LONGEST_BEAT_S = 2.0
BEATS_PER_TIMEOUT = 10


class Conversation:
    """Talk to the ranks of one communicator, on a duplicate of it.

    Every collective is a generator of steps (`waiting.run` drives one) and takes
    the name of the phase, which the error of a wait that ends in vain gives.

    Parameters
    ----------
    line : Line
        The duplicate, or a line without a communicator for one rank alone.
    timeout_s : float
        Seconds that a wait may last without any progress.

    Notes
    -----
    All ranks call the same methods in the same order. Not thread-safe: one thread at
    a time, and only that one calls MPI.
    """

    __slots__ = ("_line", "timeout_s")

    def __init__(self, line: Line, timeout_s: float) -> None:
        self._line = line
        self.timeout_s = timeout_s

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self._line.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._line.size

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self._line.host

    @property
    def broken(self) -> CollectiveTimeoutError | None:
        """Why the communicator was given up, or `None` while it works."""
        return self._line.fate.error

    def guard(self, phase: str) -> AbstractContextManager[None]:
        """Tell the other ranks when Ctrl-C or SystemExit ends the block early."""
        return self._line.guard(phase)

    def translated(self, phase: str) -> AbstractContextManager[None]:
        """Raise our error in place of one of MPI that ends the block."""
        return self._line.translated(phase)

    def patience(self, phase: str) -> Patience:
        """Return a deadline for a wait that the caller writes itself."""
        return Patience(self._line, phase, self.timeout_s)

    def allgather(self, record: bytes, phase: str) -> Steps[list[bytes]]:
        """Return the records of all ranks in rank order.

        Parameters
        ----------
        record : bytes
            Of the same length on every rank.
        phase : str
            Named by the error if ranks do not arrive.
        """
        if self.size == 1:
            return [record]
        incoming = bytearray(self.size * len(record))
        with self._step(phase):
            request = self._line.comm.Iallgather(record, incoming)
            yield from self._complete(request, phase, record, incoming)
        return _split(incoming, self.size)

    def bcast(
        self, payload: bytes | None, phase: str, root: int = ROOT
    ) -> Steps[bytes]:
        """Return root's payload, of any length, on every rank."""
        own = payload if self.rank == root else None
        if self.size == 1:
            return own or b""
        # One message does for most: its length and its first bytes.
        first = np.zeros(FIRST_NBYTES, dtype=np.uint8)
        length, head = first[:8].view(np.int64), first[8:]
        if self.rank == root:
            content = np.frombuffer(own or b"", dtype=np.uint8)
            length[0] = content.size
            head[: content.size] = content[: head.size]
        yield from self.bcast_into(first, root, phase)
        if self.rank != root:
            content = np.empty(int(length[0]), dtype=np.uint8)
            content[: head.size] = head[: content.size]
        yield from self.bcast_into(content[head.size :], root, phase)
        return own or content.tobytes()

    def bcast_into(
        self, view: npt.NDArray[np.uint8], root: int, phase: str
    ) -> Steps[None]:
        """Fill `view` on every rank with root's; same length everywhere."""
        if self.size == 1:
            return
        for start in range(0, view.size, ROUND_NBYTES):
            part = view[start : start + ROUND_NBYTES]
            with self._step(phase):
                request = self._line.comm.Ibcast(part, root)
                yield from self._complete(request, phase, part)

    def exchange(
        self, outgoing: Mapping[int, bytes], phase: str
    ) -> Steps[dict[int, bytes]]:
        """Send messages to some ranks; return those that came, by source.

        Parameters
        ----------
        outgoing : mapping of int to bytes
            Message, below 1 GiB, for each rank that gets one; this rank included.
        phase : str
            Named by the error if ranks do not arrive.
        """
        arrived = {rank: m for rank, m in outgoing.items() if rank == self.rank}
        if self.size > 1:
            others = {rank: m for rank, m in outgoing.items() if rank != self.rank}
            with self._step(phase):
                patience = self.patience(phase)
                arrived |= yield from exchange_messages(self._line, others, patience)
        return dict(sorted(arrived.items()))

    def gather(
        self, payload: bytes, phase: str, root: int = ROOT
    ) -> Steps[list[bytes] | None]:
        """Return the payloads of all ranks, of any lengths, on root only."""
        arrived = yield from self.exchange({root: payload}, phase)
        if self.rank != root:
            return None
        return [arrived[rank] for rank in range(self.size)]

    def settle(self, failure: BaseException | None, phase: str) -> Steps[None]:
        """Raise the same error on every rank if any rank has a failure.

        Parameters
        ----------
        failure : Exception or None
            What went wrong on this rank.
        phase : str
            Named by the error if ranks do not arrive.

        Notes
        -----
        The error is the lowest failing rank's, with `.rank`, `.host` and
        `.failures` set; on a failing rank its own failure is the cause.
        """
        if failure is not None and not isinstance(failure, Exception):
            with self._line.guard(phase):
                raise failure
        if self.size == 1:
            return _raise_own(failure)
        flags = yield from self.allgather(b"\0" if failure is None else b"\1", phase)
        failing = [rank for rank, flag in enumerate(flags) if flag != b"\0"]
        if failing:
            yield from self._raise_joined(failing, failure, phase)

    def agree(self, call: Callable[[], T], phase: str) -> Steps[T]:
        """Call on every rank; return this rank's value, or raise alike everywhere.

        Notes
        -----
        The other ranks hear nothing while the call runs: for file I/O of many
        seconds use `work`.
        """
        value, failure = self._attempt(call, phase)
        yield from self.settle(failure, phase)
        return value  # type: ignore[return-value]

    def on_root(self, call: Callable[[], bytes], phase: str) -> Steps[bytes]:
        """Call on rank 0 only; every rank returns its bytes, or raises its error."""
        if self.size == 1:
            return call()
        value, failure = None, None
        if self.rank == ROOT:
            value, failure = self._attempt(call, phase)
        answer = None if value is None else b"\0" + value
        if failure is not None:
            answer = b"\1" + dump_failure(failure, rank=self.rank, host=self.host)
        answer = yield from self.bcast(answer, phase)
        if answer[:1] == b"\1":
            raise join_failures([ROOT], [answer[1:]]) from failure
        return answer[1:]

    def work(
        self,
        call: Callable[[Event], T],
        phase: str,
        *,
        moved: Callable[[], object] | None = None,
    ) -> Steps[T]:
        """Call in a thread on every rank while all ranks hear that it goes on.

        Parameters
        ----------
        call : callable of threading.Event
            Local I/O. The event is set when another rank failed or this one was
            interrupted; the call then returns or raises soon, as it likes.
        phase : str
            Named by the error if ranks do not arrive.
        moved : callable, optional
            Returns a value that changes while the call goes on. A call that shows no
            change for `timeout_s` fails with `StorageError` on all ranks; without
            `moved` it may take for ever.

        Returns
        -------
        object
            What this rank's call returned, once all ranks' calls have ended well.
        """
        self._line.raise_if_given_up(phase)
        local = LocalWork(call, moved=moved, timeout_s=self.timeout_s)
        try:
            with self._line.guard(phase):
                failing = yield from beat(
                    local,
                    min(LONGEST_BEAT_S, self.timeout_s / BEATS_PER_TIMEOUT),
                    lambda: self.patience(phase),
                    lambda status: self.allgather(status, phase),
                )
        finally:
            local.stop()
        if self.size == 1:
            _raise_own(local.failure)
        elif failing:
            yield from self._raise_joined(failing, local.failure, phase)
        return local.value  # type: ignore[return-value]

    def reduce_max(
        self, own: npt.NDArray[np.float64], largest: npt.NDArray[np.float64]
    ) -> Transfer:
        """Begin to find the largest of all ranks' values, element by element.

        Parameters
        ----------
        own : ndarray of float64, shape (n,)
            This rank's values; not to be changed before the transfer is done.
        largest : ndarray of float64, shape (n,)
            Filled by then.
        """
        self._line.raise_if_given_up("reduce")
        if self.size == 1:
            largest[:] = own
            return Transfer(self._line, None, None)
        # Counted here, for who waits for the end of it has come as far as who does not.
        self._line.position += 1
        with self._line.translated("reduce"):
            request = self._line.comm.Iallreduce(own, largest, op=self._line.mpi.MAX)
        return Transfer(self._line, request, (own, largest))

    def complete(self, transfer: Transfer, phase: str) -> Steps[None]:
        """Step until a transfer is done."""
        self._line.raise_if_given_up(phase)
        with self._line.waiting(phase):
            patience = self.patience(phase)
            while not transfer.done():
                patience.check()
                yield None

    def send(self, view: Any, dest: int, tag: int = 0) -> Transfer:
        """Begin to send a buffer below 1 GiB; it is kept until it was received."""
        return send(self._line, view, dest, tag)

    def receive(self, buffer: npt.NDArray[np.uint8], tag: int = 0) -> Received | None:
        """Begin to receive a message that has arrived, or return `None` at once."""
        return receive(self._line, buffer, tag)

    def _step(self, phase: str) -> AbstractContextManager[None]:
        # A collective can end well on a rank that comes after the others gave it up.
        if self.broken is None:
            listen_now_and_then(self._line, phase)
        return self._line.step(phase)

    def _complete(self, request: Any, phase: str, *buffers: Any) -> Steps[None]:
        return complete(request, self.patience(phase), *buffers)

    def _attempt(
        self, call: Callable[[], T], phase: str
    ) -> tuple[T | None, Exception | None]:
        self._line.raise_if_given_up(phase)
        listen_now_and_then(self._line, phase)
        try:
            with self._line.guard(phase):
                return call(), None
        except Exception as failure:
            return None, failure

    def _raise_joined(
        self, failing: list[int], failure: BaseException | None, phase: str
    ) -> Steps[None]:
        records = []
        for rank in failing[:MOST_RECORDS]:
            own = None
            if rank == self.rank and failure is not None:
                own = dump_failure(failure, rank=rank, host=self.host)
            records.append((yield from self.bcast(own, phase, rank)))
        cause = failure if self.rank in failing else None
        raise join_failures(failing, records) from cause


def _split(joined: bytearray, count: int) -> list[bytes]:
    length = len(joined) // count
    return [bytes(joined[i * length : (i + 1) * length]) for i in range(count)]


def _raise_own(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure
