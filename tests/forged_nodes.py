"""Two nodes on this machine: each with a host name, and a disk that no other sees.

Ranks that are threads of one process go to them one by one: mounts and host name
belong to a thread, and to those that it starts.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

N_NODES = 2
START_TIMEOUT_S = 20.0

_CLONE_FS = 0x00000200
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_NODE = 'set -e; hostname "$0"; mount -t tmpfs "disk-of-$0" "$1"; exec sleep infinity'


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes.

    Attributes
    ----------
    pids : tuple of int
        A process of each.
    own : Path
        Where each has a disk of its own.
    """

    pids: tuple[int, ...]
    own: Path

    def enter(self, number: int) -> None:
        """Take this thread to a node."""
        libc = ctypes.CDLL(None, use_errno=True)
        _require(libc.unshare(_CLONE_FS), "unshare")
        for name, kind in (("mnt", _CLONE_NEWNS), ("uts", _CLONE_NEWUTS)):
            space = os.open(f"/proc/{self.pids[number]}/ns/{name}", os.O_RDONLY)
            _require(libc.setns(space, kind), f"enter {name} of node{number}")
            os.close(space)

    def in_turn(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a call for `run_ranks` that goes to a node first: ranks in turn."""

        def call_there(comm: Any) -> Any:
            self.enter(comm.rank % N_NODES)
            return call(comm)

        return call_there

    def all_on(self, number: int, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a call for `run_ranks` that goes to one node first."""

        def call_there(comm: Any) -> Any:
            self.enter(number)
            return call(comm)

        return call_there

    def run(self, number: int, *command: str) -> str:
        """Run a command on a node and return what it prints."""
        enter = ["nsenter", f"--target={self.pids[number]}", "--mount", "--uts"]
        done = subprocess.run(
            [*enter, *command], check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout


def why_not() -> str | None:
    """Return what this machine lacks, or None."""
    needed = ("unshare", "nsenter", "mount")
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--mount", "--uts", "true"], check=False, stderr=subprocess.DEVNULL
    )
    return "may not make namespaces" if tried.returncode else None


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Run two nodes until the body ends."""
    own = folder / "own"
    own.mkdir()
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(_ending(_node(number, own)))
            for number in range(N_NODES)
        ]
        _wait_until_asleep(programs)
        yield Nodes(pids=tuple(program.pid for program in programs), own=own)


def _node(number: int, own: Path) -> "subprocess.Popen[bytes]":
    script = ["sh", "-c", _NODE, f"node{number}", str(own)]
    return subprocess.Popen(
        ["unshare", "--mount", "--uts", *script], stdin=subprocess.DEVNULL
    )


@contextlib.contextmanager
def _ending(program: "subprocess.Popen[bytes]") -> Iterator[Any]:
    try:
        yield program
    finally:
        program.kill()
        program.wait()


def _wait_until_asleep(programs: Sequence[Any]) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    for program in programs:
        while Path(f"/proc/{program.pid}/comm").read_text() != "sleep\n":
            if program.poll() is not None or time.monotonic() > end:
                raise RuntimeError("a node was not made")
            time.sleep(0.01)


def _require(status: int, what: str) -> None:
    if status:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
