"""Runs a function in a process of its own, several side by side, none without end."""

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.mpi_launch import kill

_FORK = multiprocessing.get_context("fork")


class Hung(Exception):
    """A process did not end in time, and was killed."""


class _Child:
    """A forked process that sends back what a call returned."""

    def __init__(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float
    ) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.pipe, child_end = _FORK.Pipe(duplex=False)
        self._process = _FORK.Process(
            target=_answer, args=(child_end, function, arguments)
        )
        self._process.start()
        child_end.close()

    def outcome(self) -> Any:
        """Return what was returned; raise if it failed, died, or is late."""
        try:
            if not self.pipe.poll(max(0.0, self.deadline - time.monotonic())):
                raise Hung("it did not end in time")
            has_worked, value = self.pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the process died with exit code {code}") from None
        finally:
            self.end()
        if not has_worked:
            raise RuntimeError(value)
        return value

    def end(self) -> None:
        """Kill what still runs of it."""
        self._process.join(0 if self.deadline < time.monotonic() else 5)
        if self._process.is_alive():
            kill(self._process)
        self._process.join()
        self.pipe.close()


def in_child(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """Call in a process of its own and return what the call returned.

    Raises
    ------
    Hung
        It did not end in time.
    RuntimeError
        It raised, or died; the text is its traceback.
    """
    return _Child(function, arguments, timeout_s).outcome()


def side_by_side(
    function: Callable[..., Any],
    calls: Iterable[tuple[Any, ...]],
    *,
    timeout_s: float,
    at_once: int,
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Make each call in a process of its own; yield it with its outcome.

    The outcome is an exception where `in_child` would raise one.
    """
    left = iter(calls)
    running: dict[Connection, tuple[tuple[Any, ...], _Child]] = {}
    try:
        while True:
            while len(running) < at_once and (call := next(left, None)) is not None:
                child = _Child(function, call, timeout_s)
                running[child.pipe] = (call, child)
            if not running:
                return
            deadline = min(child.deadline for _, child in running.values())
            wait(list(running), max(0.0, deadline - time.monotonic()))
            for pipe in list(running):
                call, child = running[pipe]
                if pipe.poll() or time.monotonic() >= child.deadline:
                    del running[pipe]
                    yield call, _outcome_or_error(child)
    finally:
        for _, child in running.values():
            child.deadline = 0.0
            child.end()


def _outcome_or_error(child: _Child) -> Any:
    try:
        return child.outcome()
    except (RuntimeError, Hung) as error:
        return error


def _answer(
    pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of ranks that hang are not waited for.
    os._exit(0)
