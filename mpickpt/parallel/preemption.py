"""Notices that a job is about to be stopped: signals, and wall time that runs out."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

_SQUEUE_TIMEOUT_S = 10.0


class Preemption:
    """Remember that this process was told to stop; several managers may share one.

    Parameters
    ----------
    signals : sequence of signal numbers
        That mean "save and stop".
    install : bool or None
        Whether to install handlers. None: on the main thread inside a Slurm job.
        A handler that was there before is called too, and put back by `close`.
    end_time_s : float, optional
        When the job ends, as `time.time`. Default: what Slurm says.

    Notes
    -----
    Local: a manager agrees on it with the other ranks. Handlers can be installed on
    the main thread only.
    """

    def __init__(
        self,
        signals: Sequence[int] = SIGNALS,
        *,
        install: bool | None = None,
        end_time_s: float | None = None,
    ) -> None:
        self.is_requested = False
        self.end_time_s = end_time_s
        self._earlier: dict[int, Any] = {}
        self._users = 0
        in_slurm = "SLURM_JOB_ID" in os.environ
        on_main = threading.current_thread() is threading.main_thread()
        if install and not on_main:
            raise ValueError("signal handlers can be installed on the main thread only")
        if install or (install is None and in_slurm and on_main):
            for number in signals:
                self._earlier[number] = signal.signal(number, self._notice)

    def request(self) -> None:
        """Ask for a last save and a stop, as a signal does."""
        self.is_requested = True

    def open(self) -> None:
        """Count one more user."""
        self._users += 1

    def close(self) -> None:
        """Put the earlier handlers back, once the last user has closed."""
        self._users -= 1
        if self._users > 0:
            return
        for number, earlier in self._earlier.items():
            with suppress(ValueError, TypeError):  # not the main thread; not Python's
                signal.signal(number, earlier)
        self._earlier = {}

    def time_left_s(self, find_end: Callable[[], float | None] | None = None) -> float:
        """Return the seconds until the job ends; infinite where nobody knows.

        Notes
        -----
        Slurm is asked once, at the first call.
        """
        if self.end_time_s is None:
            found = (find_end or slurm_end_time_s)()
            self.end_time_s = float("inf") if found is None else found
        return self.end_time_s - time.time()

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True
        earlier = self._earlier.get(number)
        if callable(earlier):
            earlier(number, frame)


def slurm_end_time_s() -> float | None:
    """Return when this Slurm job ends, as `time.time`; None outside of one.

    Notes
    -----
    ``SLURM_JOB_END_TIME`` is unset in Slurm 22.05; then ``squeue -o %L`` is asked.
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return None
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if text.isdecimal():
        return float(text)
    command = ["squeue", "--noheader", "--jobs", job, "--format", "%L"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=_SQUEUE_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    left_s = parse_time_left(answer.stdout.strip())
    return None if left_s is None else time.time() + left_s


def parse_time_left(text: str) -> float | None:
    """Return the seconds that ``squeue -o %L`` tells as [days-][hours:]min:sec."""
    days, _, clock = text.rpartition("-")
    fields = clock.split(":")
    if not 2 <= len(fields) <= 3 or not all(f.isdecimal() for f in fields):
        return None
    seconds = 0
    for field in fields:
        seconds = seconds * 60 + int(field)
    return float(seconds + 86_400 * int(days or 0))
