"""Makes one system call of this process fail, or makes the process die at a moment."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from mpickpt.parallel import retention

CALLS = ("pwrite", "fsync", "rename", "open", "mkdir", "unlink")


@contextlib.contextmanager
def failing(call: str, turn: int, number: int) -> Iterator[list[str]]:
    """Make the n-th call of a function of `os` fail, once; the list tells if it did.

    Parameters
    ----------
    call : str
        One of `CALLS`.
    turn : int
        Which call fails, from 0, of all threads together.
    number : int
        The errno.
    """
    hits: list[str] = []
    lock = threading.Lock()
    left = [turn]
    original = getattr(os, call)

    def fail_once(*arguments: Any, **options: Any) -> Any:
        with lock:
            left[0] -= 1
            is_due = left[0] == -1
        if is_due:
            hits.append(f"{call} {arguments[:1]}")
            raise OSError(number, os.strerror(number))
        return original(*arguments, **options)

    setattr(os, call, fail_once)
    try:
        yield hits
    finally:
        setattr(os, call, original)


def die(number: int = signal.SIGKILL) -> None:
    """Send this process a signal."""
    os.kill(os.getpid(), number)


def die_later(delay_s: float, number: int = signal.SIGKILL) -> None:
    """Send this process a signal in a while, whatever it does then."""
    timer = threading.Timer(delay_s, die, [number])
    timer.daemon = True
    timer.start()


def die_while_pruning(place: str) -> None:
    """Die at the next removal of a checkpoint.

    Parameters
    ----------
    place : {"unpublish", "files", "directory"}
        After the manifest was removed, after the first file of a rank, or before the
        directory is.
    """

    def dying(call: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
        def wrapper(argument: Any, *rest: Any) -> None:
            call(argument if whole else list(argument)[:1], *rest)
            die()

        return wrapper

    if place == "unpublish":
        retention.unpublish = dying(retention.unpublish, whole=True)
    elif place == "files":
        retention.remove_files = dying(retention.remove_files, whole=False)
    else:
        retention.remove_directory_if_empty = lambda _: die()
