"""The directory that is measured in: made for it, and gone whatever happens."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mpickpt.bench.ranks import Ranks
from mpickpt.cli.output import nbytes_text
from mpickpt.cli.status import UsageError
from mpickpt.storage.filesystem import free_nbytes, mount_of

_MEMINFO = Path("/proc/meminfo")
_PREFIX = "mpickpt-bench-"
_SLACK_NBYTES = 64 << 20

# Ends when rank 0 does, however it does: its end of the pipe is closed then. The
# other ranks, which the launcher kills, may create a last file meanwhile.
_WATCHER = 'cat >/dev/null; sleep 1; rm -rf -- "$0"'


@contextmanager
def working_directory(ranks: Ranks, parent: Path, needed: int) -> Iterator[Path]:
    """Make a directory for the ranks, and remove it with all that is in it.

    Parameters
    ----------
    ranks : Ranks
        All of them see the directory.
    parent : Path
        An existing directory, on the file system to be measured.
    needed : int
        Bytes that are going to lie in it at the same time.

    Raises
    ------
    UsageError
        There is no such directory, or no room in it.

    Notes
    -----
    Collective. Also removed when rank 0 is killed: a process of its own sees to it.
    """
    with ExitStack() as stack:

        def make() -> Path:
            _require_room(parent, needed + _SLACK_NBYTES)
            try:
                return stack.enter_context(scratch_directory(parent, _PREFIX))
            except OSError as error:
                reason = error.strerror
                raise UsageError(f"cannot measure in {parent}: {reason}") from error

        yield ranks.from_root(make)
        ranks.barrier()


@contextmanager
def scratch_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a directory with a name of its own; remove it with all that is in it.

    Parameters
    ----------
    parent : Path
        An existing directory.
    prefix : str
        What its name begins with.

    Raises
    ------
    OSError
        It cannot be made.

    Notes
    -----
    Also removed when this process is killed: one of its own sees to it.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent.resolve()))
    watcher = _watcher(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        # It leaves the directory to whoever dies before all ranks are done.
        if not path.exists():
            watcher.kill()
            watcher.wait()


def require_memory(ranks: Ranks, needed: int) -> None:
    """Raise UsageError unless the machine has so many bytes free for each rank."""
    wanted = needed * ranks.size + _SLACK_NBYTES
    free = available_memory()
    if free is not None and min(ranks.all_of(free)) < wanted:
        raise UsageError(
            f"{ranks.size} ranks need {nbytes_text(wanted)} of memory, and "
            f"{nbytes_text(free)} are free: pass a smaller --nbytes"
        )


def available_memory() -> int | None:
    """Return the bytes of memory that are free, or None where that is not told."""
    with suppress(OSError, ValueError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def file_system_name(path: Path) -> str:
    """Return which file system a directory lies on: "ext4 at /scratch"."""
    mount = mount_of(path)
    if mount is None:
        return "a file system that the kernel does not name"
    return f"{mount.type} at {mount.point}"


def _require_room(parent: Path, needed: int) -> None:
    if not parent.is_dir():
        raise UsageError(f"{parent} is not a directory")
    free = free_nbytes(parent)
    if free < needed:
        raise UsageError(
            f"{parent} has {nbytes_text(free)} free; {nbytes_text(needed)} are "
            "needed: pass a smaller --nbytes, or another directory"
        )


def _watcher(path: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        ["/bin/sh", "-c", _WATCHER, os.fspath(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
