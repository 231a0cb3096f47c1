"""The ranks that measure together: they begin at once and wait without spinning."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, TypeVar, cast

T = TypeVar("T")

_LONGEST_SLEEP_S = 5e-3
_FIRST_SLEEP_S = 50e-6


class Ranks:
    """One communicator, and the few collectives that measuring takes.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.

    Notes
    -----
    What spins in MPI takes the processor from the rank that it waits for, so every
    collective here begins with a barrier that sleeps.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    def barrier(self) -> None:
        """Wait for all ranks."""
        request, pause_s = self.comm.Ibarrier(), _FIRST_SLEEP_S
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LONGEST_SLEEP_S)

    def timed(self, way: Callable[[], object]) -> float:
        """Call on all ranks at once and return the seconds of the slowest."""
        self.barrier()
        begin = perf_counter()
        way()
        return self.largest(perf_counter() - begin)

    def largest(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return max(self.all_of(value))

    def total(self, value: float) -> float:
        """Return the sum of all ranks' values."""
        return sum(self.all_of(value))

    def all_of(self, value: T) -> list[T]:
        """Return every rank's value."""
        self.barrier()
        values: list[T] = self.comm.allgather(value)
        return values

    def from_root(self, call: Callable[[], T]) -> T:
        """Let rank 0 call; return its value, or raise its error, on every rank."""
        value: T | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                value = call()
            except Exception as failure:
                error = failure
        self.barrier()
        value, error = self.comm.bcast((value, error))
        if error is not None:
            raise error
        return cast(T, value)

    @contextmanager
    def first(self, count: int) -> Iterator["Ranks | None"]:
        """Yield the first `count` ranks to themselves, and None to the others."""
        part = self.comm.Split(0 if self.rank < count else 1)
        yield Ranks(part) if self.rank < count else None
        self.barrier()
        part.Free()

    @contextmanager
    def afresh(self) -> Iterator["Ranks"]:
        """Yield the same ranks, of whose saves the library remembers nothing."""
        duplicate = self.comm.Dup()
        yield Ranks(duplicate)
        self.barrier()
        duplicate.Free()
