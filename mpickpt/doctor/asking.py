"""Asks a file system, which may refuse or never answer; what it refuses is noted."""

import os
import platform
import queue
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from mpickpt.planning.findings import Failure
from mpickpt.storage.probes import errno_name

T = TypeVar("T")

LIMIT_S = 60.0
# Once a call has not come back, others hardly will.
LIMIT_AFTER_HANG_S = 3.0


class Asking:
    """Makes calls that may fail or hang, one after another.

    Parameters
    ----------
    limit_s : float
        How long one call may take.

    Attributes
    ----------
    failures : list of Failure
        What did not work.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.failures: list[Failure] = []
        self._limit_s = limit_s

    @property
    def has_hung(self) -> bool:
        """Whether a call has not come back; its thread waits for it still."""
        return any(failure.has_hung for failure in self.failures)

    def ask(self, probe: str, call: Callable[[], T]) -> T | None:
        """Return what a call returns; None, and a failure is noted, if it cannot.

        Notes
        -----
        The call is made in a thread of its own, for not even a signal ends a system
        call that waits for a server. It must not talk MPI.
        """
        answers: queue.SimpleQueue[tuple[T | None, Exception | None]]
        answers = queue.SimpleQueue()

        def answer() -> None:
            try:
                answers.put((call(), None))
            except Exception as error:
                answers.put((None, error))

        threading.Thread(target=answer, name=f"doctor-{probe}", daemon=True).start()
        try:
            value, error = answers.get(timeout=self._limit_s)
        except queue.Empty:
            text = f"no answer within {self._limit_s:g} s"
            self.note(probe, None, text, has_hung=True)
            self._limit_s = min(self._limit_s, LIMIT_AFTER_HANG_S)
            return None
        if isinstance(error, OSError | MemoryError):
            self.note(probe, getattr(error, "errno", None), str(error))
        elif error is not None:
            raise error
        return value

    def note(
        self, probe: str, number: int | None, text: str, *, has_hung: bool = False
    ) -> None:
        """Note what did not work."""
        self.failures.append(
            Failure(
                probe=probe,
                errno=errno_name(number),
                text=text,
                host=platform.node(),
                has_hung=has_hung,
            )
        )


def leave(exit_status: int) -> NoReturn:
    """End this process though a thread of it hangs, and without removing anything.

    Removing would hang too. The process that watches over the directory tries.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)
