"""A few ranks as threads of this process: a double of the mpi4py surface in use.

`run_ranks` calls a function once per rank with a communicator. The module itself
stands in for ``mpi4py.MPI``: the library asks a communicator's class for its module.
Messages are copied when they are sent; collectives complete when all have posted.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ANY_SOURCE = -1
BYTE = "byte"
ERRORS_RETURN = "errors return"
IDENT = 0
UNEQUAL = 3
COMM_WORLD = None
MAX = "max"
THREAD_FUNNELED, THREAD_MULTIPLE = 1, 3


class Exception(RuntimeError):
    """What the double's calls raise where MPI would."""


def Is_finalized() -> bool:
    return False


def Query_thread() -> int:
    return THREAD_MULTIPLE


def run_ranks(
    size: int, function: Callable[[Any], Any], timeout_s: float = 20.0
) -> list[Any]:
    """Call ``function(comm)`` on `size` ranks and return results or exceptions.

    A rank that has not come back after `timeout_s` yields a `TimeoutError`; its
    thread is a daemon and stays behind.
    """
    group = _Group(size)
    outcomes: list[Any] = [
        TimeoutError(f"rank {rank} still runs after {timeout_s} s")
        for rank in range(size)
    ]

    def run_rank(rank: int) -> None:
        try:
            outcomes[rank] = function(Comm(group, rank))
        except BaseException as error:
            outcomes[rank] = error

    threads = [
        threading.Thread(target=run_rank, args=(rank,), daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(outcomes)


@dataclass(eq=False)
class _Envelope:
    source: int
    tag: int
    content: bytes
    matched: bool = False


@dataclass(eq=False)
class _Collective:
    """One collective call: what each rank brought, and its result when all came."""

    size: int
    brought: dict[int, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.brought) == self.size


class _Group:
    """What the ranks of one communicator share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.Lock()
        self.mailboxes: dict[int, list[_Envelope]] = defaultdict(list)
        self.collectives: dict[int, _Collective] = {}
        self.duplicates: dict[int, _Group] = {}

    def collective(self, number: int) -> _Collective:
        with self.lock:
            return self.collectives.setdefault(number, _Collective(self.size))

    def duplicate(self, number: int) -> "_Group":
        with self.lock:
            return self.duplicates.setdefault(number, _Group(self.size))


class Status:
    source = ANY_SOURCE
    nbytes = 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, _datatype: Any) -> int:
        return self.nbytes


class _Request:
    """Complete once `ready` is true; then `finish` runs, once."""

    def __init__(
        self, ready: Callable[[], bool], finish: Callable[[], None] | None = None
    ) -> None:
        self._ready = ready
        self._finish = finish
        self._over = False

    def Test(self) -> bool:
        if not self._over and self._ready():
            if self._finish is not None:
                self._finish()
            self._over = True
        return self._over


class _Message:
    def __init__(self, envelope: _Envelope) -> None:
        self._envelope = envelope

    def Recv(self, buffer: Any) -> None:
        _fill(buffer, self._envelope.content)

    def Irecv(self, buffer: Any) -> _Request:
        self._envelope.matched = True
        return _Request(lambda: True, lambda: self.Recv(buffer))


class Comm:
    """One rank's handle of a communicator."""

    _keyvals = 0

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._posted = 0
        self._attributes: dict[int, Any] = {}
        self.freed = False

    @classmethod
    def Create_keyval(cls, delete_fn: Callable[..., None]) -> int:
        cls._keyvals += 1
        _delete_functions[cls._keyvals] = delete_fn
        return cls._keyvals

    @staticmethod
    def Compare(one: Any, other: Any) -> int:
        return IDENT if one is other else UNEQUAL

    def Get_attr(self, keyval: int) -> Any:
        return self._attributes.get(keyval)

    def Set_attr(self, keyval: int, value: Any) -> None:
        self._attributes[keyval] = value

    def Free(self) -> None:
        for keyval, value in self._attributes.items():
            _delete_functions[keyval](self, keyval, value)
        self.freed = True

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._group.size

    rank = property(Get_rank)
    size = property(Get_size)

    def Is_inter(self) -> bool:
        return False

    def Set_errhandler(self, _handler: Any) -> None:
        pass

    def Idup(self) -> tuple["Comm", _Request]:
        duplicate = Comm(self._group.duplicate(self._posted), self._rank)
        return duplicate, self.Ibarrier()

    def Isend(self, message: Any, dest: int, tag: int) -> _Request:
        self._deliver(message, dest, tag)
        return _Request(lambda: True)

    def Issend(self, message: Any, dest: int, tag: int) -> _Request:
        envelope = self._deliver(message, dest, tag)
        return _Request(lambda: envelope.matched)

    def Improbe(self, source: int, tag: int, status: Status) -> _Message | None:
        assert source == ANY_SOURCE
        with self._group.lock:
            mailbox = self._group.mailboxes[self._rank]
            envelope = next((e for e in mailbox if e.tag == tag), None)
            if envelope is None:
                return None
            mailbox.remove(envelope)
        status.source, status.nbytes = envelope.source, len(envelope.content)
        return _Message(envelope)

    def Ibarrier(self) -> _Request:
        call = self._post(None)
        return _Request(lambda: call.complete)

    def Iallgather(self, record: Any, incoming: Any) -> _Request:
        call = self._post(_copy(record))
        return _Request(lambda: call.complete, lambda: _fill(incoming, _joined(call)))

    def Iallreduce(self, own: Any, largest: Any, op: Any) -> _Request:
        assert op == MAX
        call = self._post(own.copy())

        def finish() -> None:
            largest[:] = np.max(list(call.brought.values()), axis=0)

        return _Request(lambda: call.complete, finish)

    def Ibcast(self, view: Any, root: int) -> _Request:
        call = self._post(_copy(view) if self._rank == root else None)
        return _Request(
            lambda: root in call.brought, lambda: _fill(view, call.brought[root])
        )

    def Igatherv(self, token: Any, arrived: Any, root: int) -> _Request:
        call = self._post(_copy(token))
        if self._rank != root:
            return _Request(lambda: True)

        def ready() -> bool:
            for rank, content in list(call.brought.items()):
                arrived[rank] = np.frombuffer(content, dtype=arrived.dtype)[0]
            return call.complete

        return _Request(ready)

    def Iscatterv(self, copies: Any, part: Any, root: int) -> _Request:
        call = self._post(_copy(copies) if self._rank == root else None)

        def finish() -> None:
            nbytes = part.nbytes
            start = nbytes * self._rank
            _fill(part, call.brought[root][start : start + nbytes])

        return _Request(lambda: root in call.brought, finish)

    def _deliver(self, message: Any, dest: int, tag: int) -> _Envelope:
        envelope = _Envelope(self._rank, tag, _copy(message))
        with self._group.lock:
            self._group.mailboxes[dest].append(envelope)
        return envelope

    def _post(self, brought: Any) -> _Collective:
        call = self._group.collective(self._posted)
        self._posted += 1
        call.brought[self._rank] = brought
        return call


_delete_functions: dict[int, Callable[..., None]] = {}


def _copy(message: Any) -> bytes:
    return bytes(memoryview(message).cast("B")) if len(message) else b""


def _fill(buffer: Any, content: bytes) -> None:
    view = memoryview(buffer).cast("B")
    if not view.readonly:
        view[: len(content)] = content


def _joined(call: _Collective) -> bytes:
    return b"".join(call.brought[rank] for rank in range(call.size))
