"""Asks the tools of a site (`lfs`, `mmlsquota`, `quota`); alone starts programs here.

Whatever such a tool does (it is absent, fails, hangs, answers nonsense), the library
goes on without its answer.
"""

import contextlib
import logging
import os
import select
import shutil
import signal
import time
from collections.abc import Collection, Sequence

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
HUNG_FOR_S = 600.0

# Administrators' tools are often not in the PATH of a job.
_MORE_FOLDERS = ("/usr/sbin", "/sbin", "/usr/lpp/mmfs/bin")
_MOST_NBYTES = 4 << 20

_hung: dict[str, float] = {}


def run_site_command(
    argv: Sequence[str],
    timeout_s: float = TIMEOUT_S,
    *,
    exit_codes: Collection[int] = (0,),
) -> str | None:
    """Return what a command prints, or None if it cannot tell.

    Parameters
    ----------
    argv : sequence of str
        The command, looked for in PATH and where administrators' tools lie, and its
        arguments.
    timeout_s : float
        A command that takes longer has hung.
    exit_codes : collection of int
        Those with which the answer counts: `quota` says by 1 that a limit is passed.

    Returns
    -------
    str or None
        None if the command is absent, fails, or has hung; its whole process group is
        killed then, and it is not started again in this process for ten minutes: what
        waits for a server that is gone cannot even be killed.

    Notes
    -----
    For rank 0. It runs in the locale C, without input; what it says on stderr is lost.
    """
    executable = _found(argv[0])
    if executable is None:
        log.debug("%s is not here", argv[0])
        return None
    if time.monotonic() < _hung.get(executable, 0.0):
        return None
    try:
        code, output = _run(executable, argv, timeout_s)
    except OSError as error:
        log.debug("%s: %s", executable, error)
        return None
    if code is None:
        _hung[executable] = time.monotonic() + HUNG_FOR_S
        log.info("%s does not answer within %g s", " ".join(argv), timeout_s)
        return None
    if code not in exit_codes:
        log.debug("%s ends with exit code %d", " ".join(argv), code)
        return None
    return output.decode(errors="surrogateescape")


def _found(name: str) -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_MORE_FOLDERS])
    found = shutil.which(name, path=path)
    return os.path.abspath(found) if found else None


def _run(
    executable: str, argv: Sequence[str], timeout_s: float
) -> tuple[int | None, bytes]:
    """Return exit code and output; no code if it has hung."""
    end = time.monotonic() + timeout_s
    reading, writing = os.pipe()
    try:
        try:
            child = _spawn(executable, argv, writing)
        finally:
            os.close(writing)
        output = _read_until(reading, end)
        code = None if output is None else _wait_until(child, end)
        if code is None:
            _kill(child)
        return code, output or b""
    finally:
        os.close(reading)


def _spawn(executable: str, argv: Sequence[str], stdout: int) -> int:
    # fork() after MPI_Init is undefined, and crashes where memory is registered with
    # the network; posix_spawn copies no memory. subprocess takes it only sometimes.
    return os.posix_spawn(
        executable,
        list(argv),
        os.environ | {"LC_ALL": "C"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, stdout, 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
        setpgroup=0,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGTERM, signal.SIGINT),
    )


def _read_until(reading: int, end: float) -> bytes | None:
    """Return all that comes; None if no end of it comes in time."""
    pieces: list[bytes] = []
    left = _MOST_NBYTES
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while left > 0 and (wait_s := end - time.monotonic()) > 0:
        if poll.poll(wait_s * 1000):
            piece = os.read(reading, 1 << 16)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)
            left -= len(piece)
    return None


def _wait_until(child: int, end: float) -> int | None:
    pause_s = 0.001
    while True:
        try:
            done, status = os.waitpid(child, os.WNOHANG)
        except ChildProcessError:  # SIGCHLD is ignored, or another one reaps
            return 0
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _kill(child: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    # It dies at once or, if it waits for a server that is gone, perhaps never.
    _wait_until(child, time.monotonic() + 0.1)
