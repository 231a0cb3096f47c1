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
        Whether to follow all threads; else one alone: the main thread, which makes
        directories and publishes, or the one that is named to `injected`.
    path : str, tuple of str or None
        Only calls on this path, or one of these, as of ``strace -P``.
    """

    rank: int
    inject: str
    threads: bool = True
    path: str | tuple[str, ...] | None = None

    @property
    def call(self) -> str:
        """Name of the system call."""
        return self.inject.partition(":")[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths; none where there is no limit."""
        path = self.path or ()
        return (path,) if isinstance(path, str) else tuple(path)


@contextlib.contextmanager
def injected(fault: Fault, tid: int | None = None) -> Iterator[list[str]]:
    """Trace this process meanwhile; the list gets the calls that were tampered with.

    Parameters
    ----------
    fault : Fault
        What is done.
    tid : int, optional
        Native id of the thread to attach to, by default that of the main thread.
    """
    options = ["-f"] if fault.threads else []
    options += [word for path in fault.paths for word in ("-P", path)]
    options += ["-e", f"trace={fault.call}", "-e", f"inject={fault.inject}"]
    hits: list[str] = []
    with traced(options, tid) as lines:
        yield hits
    hits += [line for line in lines if "INJECTED" in line]


@contextlib.contextmanager
def traced(options: list[str], tid: int | None = None) -> Iterator[list[str]]:
    """Trace this process, or one thread of it; the list gets what strace wrote."""
    lines: list[str] = []
    with tempfile.NamedTemporaryFile(prefix="strace-") as trace:
        strace = _attached([*options, "-o", trace.name], tid or os.getpid())
        try:
            yield lines
        finally:
            strace.terminate()
            strace.wait(ATTACH_TIMEOUT_S)
            lines += trace.read().decode(errors="replace").splitlines()


def _attached(options: list[str], tid: int) -> "subprocess.Popen[str]":
    strace = subprocess.Popen(
        ["strace", *options, "-p", str(tid)],
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
