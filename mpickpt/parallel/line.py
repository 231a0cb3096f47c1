"""One private duplicate of a communicator, and whether it can still be used.

Touches MPI through the communicator that it was given; imports no mpi4py, because a
program without a communicator must never initialise MPI.
"""

import ctypes
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from mpickpt.errors import CollectiveTimeoutError
from mpickpt.parallel.ulfm import dead_ranks_soon, is_death, revoke, words_for

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
    """Remember the first failure after which a communicator was given up.

    Attributes
    ----------
    error : CollectiveTimeoutError or None
        That failure.
    duplicates : list of mpi4py.MPI.Intracomm
        The library's own, which end together.
    """

    __slots__ = ("duplicates", "error")

    def __init__(self) -> None:
        self.error: CollectiveTimeoutError | None = None
        self.duplicates: list[Any] = []


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
        with self.waiting(phase):
            yield

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Give the line up if the end of a collective step is not awaited."""
        with self.translated(phase):
            try:
                yield
            except BaseException as error:
                if self.fate.error is None and not isinstance(
                    error, self.mpi.Exception
                ):
                    self._break_off(phase, error)
                raise

    @contextmanager
    def translated(self, phase: str) -> Iterator[None]:
        """Give the line up after an error of MPI, and raise ours in its place."""
        try:
            yield
        except Exception as error:
            if self.mpi is None or not isinstance(error, self.mpi.Exception):
                raise
            raise self._lost(phase, error) from error

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
            raise self._given_up_before(phase, earlier)

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

    def lose(self, phase: str, dead: list[int]) -> CollectiveTimeoutError:
        """Mark the communicator as unusable, for ranks of it died."""
        return self.give_up(phase, dead, words_for(dead))

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

    def _given_up_before(
        self, phase: str, earlier: CollectiveTimeoutError
    ) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{phase}: this communicator was given up after an earlier failure "
            f"({earlier.message}); abort the program",
            phase=phase,
            missing_ranks=earlier.missing_ranks,
            rank=self.rank,
            host=self.host,
        )

    def _lost(self, phase: str, error: Exception) -> CollectiveTimeoutError:
        """Give the line up after an error of MPI; if a rank died, tell the others."""
        earlier = self.fate.error
        if earlier is not None:
            return self._given_up_before(phase, earlier)
        if not is_death(self.mpi, error):
            return self.give_up(phase, [], f"MPI reports: {error}")
        revoke(self.mpi, self.fate.duplicates)
        return self.lose(phase, dead_ranks_soon(self.mpi, self.comm))

    def _break_off(self, phase: str, error: BaseException) -> None:
        self.give_up(phase, [self.rank], f"ended here by {type(error).__name__}")
        # A generator may be closed by the collector, on any thread: stay silent.
        if not isinstance(error, GeneratorExit) and not self.mpi.Is_finalized():
            with suppress(self.mpi.Exception):
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
