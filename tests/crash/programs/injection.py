"""Has strace fail, or kill at, a system call of this very process."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

ATTACH_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What strace does to one rank.

    Attributes
    ----------
    rank : int
        The rank it is done to.
    inject : str
        As of ``strace -e inject=``. Calls are counted in each thread by itself, from
        the moment of the attaching.
    threads : bool
        Whether to follow all threads; else the main thread alone, which makes
        directories and publishes.
    path : str or None
        Only calls on this path, as of ``strace -P``.
    """

    rank: int
    inject: str
    threads: bool = True
    path: str | None = None

    @property
    def call(self) -> str:
        """Name of the system call."""
        return self.inject.partition(":")[0]


@contextlib.contextmanager
def injected(fault: Fault) -> Iterator[list[str]]:
    """Trace this process meanwhile; the list gets the calls that were tampered with."""
    hits: list[str] = []
    with tempfile.NamedTemporaryFile(prefix="strace-") as trace:
        strace = _attached(fault, trace.name)
        try:
            yield hits
        finally:
            strace.terminate()
            strace.wait(ATTACH_TIMEOUT_S)
            lines = trace.read().decode(errors="replace").splitlines()
            hits += [line for line in lines if "INJECTED" in line]


def _attached(fault: Fault, trace: str) -> "subprocess.Popen[str]":
    options = ["-f"] if fault.threads else []
    options += ["-P", fault.path] if fault.path else []
    strace = subprocess.Popen(
        [
            *("strace", *options, "-o", trace, "-e", f"trace={fault.call}"),
            *("-e", f"inject={fault.inject}", "-p", str(os.getpid())),
        ],
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C of the test goes to mpiexec, not to strace alone.
        start_new_session=True,
    )
    assert strace.stderr is not None
    for line in strace.stderr:
        if "attached" in line:
            return strace
    raise RuntimeError(f"strace did not attach: exit code {strace.wait()}")
