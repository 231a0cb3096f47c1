"""Measures what a process uses: memory, descriptors, threads, communicators."""

import ctypes
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

_SELF = Path("/proc/self")
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_CALM_S = 2.0
PYTHON_BLOCK_NBYTES = 80


class CountingComm(MPI.Intracomm):
    """A communicator that counts the duplicates made of it, and of those, and freed."""

    n_open = 0

    def Idup(self, *arguments: Any, **options: Any) -> Any:
        """Duplicate, counting."""
        CountingComm.n_open += 1
        return super().Idup(*arguments, **options)

    def Dup(self, *arguments: Any, **options: Any) -> Any:
        """Duplicate, counting."""
        CountingComm.n_open += 1
        return super().Dup(*arguments, **options)

    def Split(self, *arguments: Any, **options: Any) -> Any:
        """Split, counting."""
        CountingComm.n_open += 1
        return super().Split(*arguments, **options)

    def Free(self) -> None:
        """Free, counting."""
        CountingComm.n_open -= 1
        super().Free()


def resident_nbytes() -> int:
    """Return the bytes of memory that this process has to itself."""
    words = (_SELF / "statm").read_text().split()
    return (int(words[1]) - int(words[2])) * _PAGE_NBYTES


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_nbytes() -> int:
    """Return the bytes that are allocated and not freed; those of Python roughly.

    Unlike resident memory, it does not hide in what was freed before.
    """
    gc.collect()
    nbytes = sys.getallocatedblocks() * PYTHON_BLOCK_NBYTES
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):  # of glibc
        libc.mallinfo2.restype = _Mallinfo
        found = libc.mallinfo2()
        nbytes += found.uordblks + found.hblkhd
    return nbytes


def held() -> dict[str, int]:
    """Return the descriptors, threads and communicators that are open."""
    return {
        "descriptors": len(os.listdir(_SELF / "fd")),
        "threads": len(os.listdir(_SELF / "task")),
        "communicators": CountingComm.n_open,
    }


def calm(wanted: dict[str, int] | None) -> dict[str, int]:
    """Return what is held, once threads that are ending have ended.

    A beat of the lease opens its file for a moment, and a thread that has told its
    result is still there for a moment: so look again while there is more than wanted.
    """
    end = time.monotonic() + _CALM_S
    least = held()
    while time.monotonic() < end:
        if wanted is not None and all(least[name] <= wanted[name] for name in least):
            break
        now = held()
        least = {name: min(least[name], now[name]) for name in least}
        if wanted is None and time.monotonic() > end - _CALM_S + 0.2:
            break
        time.sleep(0.001)
    return least


def growth(values: Sequence[int]) -> float:
    """Return by how much one value exceeds the one before, in the middle of all.

    MPI's pools grow by a step of megabytes once, whenever that is; a leak goes on.
    """
    return float(np.median(np.diff(values)))
