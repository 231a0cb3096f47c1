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
        self._signals = tuple(signals)
        self._install = install
        self._end_s = None if end_time_s is None else _on_own_clock(end_time_s)
        self._earlier: dict[int, Any] = {}
        self._users = 0
        self._is_closed = False
        self._sampled_step: int | None = None
        self._sample = False
        self._install_handlers()

    def request(self) -> None:
        """Ask for a last save and a stop, as a signal does."""
        self.is_requested = True

    def is_requested_at(self, step: int) -> bool:
        """Tell whether a stop is asked for, all through a step what it was at first.

        Notes
        -----
        So that managers which share this stop at the same step, even if the signal
        comes after one of them has looked.
        """
        if step != self._sampled_step:
            self._sampled_step = step
            self._sample = self.is_requested
        return self._sample

    def open(self) -> None:
        """Count one more user; install the handlers again if they were put back."""
        self._users += 1
        if self._is_closed:
            self._is_closed = False
            self._install_handlers()

    def close(self) -> None:
        """Put the earlier handlers back, once the last user has closed."""
        self._users -= 1
        if self._users > 0 or self._is_closed:
            return
        self._is_closed = True
        for number in list(self._earlier):
            # One that was installed since stays, and calls this one, which hands on.
            if signal.getsignal(number) == self._notice:
                with suppress(ValueError, TypeError):  # other thread; not Python's
                    signal.signal(number, self._living_earlier(number))
                del self._earlier[number]

    def time_left_s(self, find_end: Callable[[], float | None] | None = None) -> float:
        """Return the seconds until the job ends; infinite where nobody knows.

        Notes
        -----
        Slurm is asked once, at the first call; from then on the time is counted, so
        that setting the system's clock changes nothing.
        """
        if self._end_s is None:
            found = (find_end or slurm_end_time_s)()
            self._end_s = _on_own_clock(float("inf") if found is None else found)
        return self._end_s - time.monotonic()

    def _install_handlers(self) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        if self._install and not on_main:
            raise ValueError("signal handlers can be installed on the main thread only")
        in_slurm = "SLURM_JOB_ID" in os.environ
        if self._install or (self._install is None and in_slurm and on_main):
            for number in self._signals:
                if number not in self._earlier:
                    self._earlier[number] = signal.signal(number, self._notice)

    def _living_earlier(self, number: int) -> Any:
        """Return the handler of before, passing over those that were closed since."""
        earlier = self._earlier[number]
        owner = getattr(earlier, "__self__", None)
        if isinstance(owner, Preemption) and owner._is_closed:
            return owner._living_earlier(number)
        return earlier

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
    fields = [days or "0", *clock.split(":")]
    if not 3 <= len(fields) <= 4 or not all(f.isdecimal() for f in fields):
        return None
    seconds = 0
    for field in fields[1:]:
        seconds = seconds * 60 + int(field)
    return float(seconds + 86_400 * int(fields[0]))


def _on_own_clock(time_s: float) -> float:
    return time_s - time.time() + time.monotonic()
