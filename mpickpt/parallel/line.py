"""One private duplicate of a communicator, and whether it can still be used.

Touches MPI through the communicator that it was given; imports no mpi4py, because a
program without a communicator must never initialise MPI.
"""

import ctypes
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from mpickpt.errors import CollectiveTimeoutError

ROOT = 0

TAG_EXPIRED = 1
TAG_QUIT = 2
TAG_QUERY = 3
TAG_PRESENT = 4
TAG_VERDICT = 5
TAG_EXCHANGE = 100
TAG_TRANSFER = 1000

MOST_RANKS_NAMED = 256
PROBES = 6

Words = npt.NDArray[np.int64]


class Fate:
    """Remember the first failure after which a communicator was given up."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: CollectiveTimeoutError | None = None


class Line:
    """Hold a duplicate of the user's communicator, or none for one rank alone.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        The duplicate; `None` when the world is this rank.
    mpi : module or None
        Module of the communicator's class: mpi4py.MPI or a test's double.
    fate : Fate
        Shared by all duplicates of one communicator of the user.
    """

    def __init__(self, comm: Any, mpi: Any, fate: Fate) -> None:
        self.comm = comm
        self.mpi = mpi
        self.fate = fate
        self.rank: int = 0 if comm is None else comm.Get_rank()
        self.size: int = 1 if comm is None else comm.Get_size()
        self.host = socket.gethostname()
        self.position = 0
        self.heard_s = 0.0
        self.exchanges = 0
        self.transfers: set[Any] = set()
        self.loopback: dict[int, deque[bytes]] = {}

    @contextmanager
    def step(self, phase: str) -> Iterator[None]:
        """Count one collective step; give the line up if it ends halfway."""
        self.raise_if_given_up(phase)
        self.position += 1
        try:
            yield
        except BaseException as error:
            if self.fate.error is None:
                self._break_off(phase, error)
            raise

    @contextmanager
    def guard(self, phase: str) -> Iterator[None]:
        """Give the line up if an interruption ends the block; let errors pass."""
        try:
            yield
        except Exception:
            raise
        except BaseException as interruption:
            if self.fate.error is None and self.comm is not None:
                self._break_off(phase, interruption)
            raise

    def raise_if_given_up(self, phase: str) -> None:
        """Raise at once if an earlier call on this communicator was given up."""
        earlier = self.fate.error
        if earlier is not None:
            raise CollectiveTimeoutError(
                f"{phase}: this communicator was given up after an earlier failure "
                f"({earlier.message}); abort the program",
                phase=phase,
                missing_ranks=earlier.missing_ranks,
                rank=self.rank,
                host=self.host,
            )

    def give_up(
        self, phase: str, missing: list[int], reason: str
    ) -> CollectiveTimeoutError:
        """Mark the communicator as unusable and return the error that says why."""
        error = CollectiveTimeoutError(
            f"{phase}: {reason}; abort the program: the last published one loads",
            phase=phase,
            missing_ranks=missing,
            rank=self.rank,
            host=self.host,
        )
        self.fate.error = error
        for transfer in self.transfers:
            keep_forever(transfer)
        return error

    def post(self, tag: int, dest: int, words: list[int]) -> None:
        """Send a few integers that nobody waits for."""
        message = np.array(words[:MOST_RANKS_NAMED], dtype=np.int64)
        keep_forever((self.comm.Isend(message, dest, tag), message))

    def post_to_all(self, tag: int, words: list[int]) -> None:
        """Send a few integers to every other rank."""
        for dest in range(self.size):
            if dest != self.rank:
                self.post(tag, dest, words)

    def take(self, tag: int) -> tuple[int, list[int]] | None:
        """Return (source, integers) of a message that has arrived, if there is one."""
        status = self.mpi.Status()
        # A probe looks before it lets MPI fetch a little of what lies on the wire.
        for _ in range(PROBES):
            message = self.comm.Improbe(self.mpi.ANY_SOURCE, tag, status)
            if message is not None:
                break
        else:
            return None
        words: Words = np.empty(status.Get_count(self.mpi.BYTE) // 8, dtype=np.int64)
        message.Recv(words)
        return status.Get_source(), words.tolist()

    def free(self) -> None:
        """Free the duplicate, unless messages may still be under way on it."""
        unused = self.fate.error is None and not self.transfers
        if self.comm is not None and unused and not self.mpi.Is_finalized():
            self.comm.Free()

    def _break_off(self, phase: str, error: BaseException) -> None:
        if isinstance(error, self.mpi.Exception):
            raise self.give_up(phase, [], f"MPI reports: {error}") from error
        self.give_up(phase, [self.rank], f"ended here by {type(error).__name__}")
        # A generator may be closed by the collector, on any thread: stay silent.
        if not isinstance(error, GeneratorExit) and not self.mpi.Is_finalized():
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        if self.rank == ROOT:
            self.post_to_all(TAG_VERDICT, [ROOT])
        else:
            self.post(TAG_QUIT, ROOT, [self.position])


def keep_forever(value: object) -> None:
    """Keep a value alive until the process is gone.

    MPI may write into the buffer of a request that was given up as late as in
    MPI_Finalize, when the interpreter has already cleared every module.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
