"""Asynchronous saves: how long the program waits, and how much slower it runs."""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from mpickpt.bench.bench import Bench
from mpickpt.bench.rounds import Timings, shuffled
from mpickpt.bench.rows import Row, at_most
from mpickpt.parallel.pending import save_sharded_async

COPY, BLOCKING = "copy", "save_sharded_async"
ALONE, NICE, PLAIN = "alone", "with nice", "without nice"
Begin = Callable[[], Any]

_NICE_VARIABLE = "MPICKPT_NICE"
_ALONE_S = 0.5
_STEP_ELEMENTS = 8192
_STEP_REPEATS = 20


def measure_blocking(bench: Bench) -> list[Row]:
    """Measure how long an asynchronous save blocks, against one copy of the state."""
    buffers = [np.ones_like(array) for array in bench.arrays.values()]
    pending: list[Any] = []

    def copy() -> None:
        for array, buffer in zip(bench.arrays.values(), buffers, strict=True):
            buffer[...] = array

    def finish() -> None:
        while pending:
            pending.pop().result()
        bench.clear()

    timings = Timings({COPY: [], BLOCKING: []})
    for number in range(bench.repeat + 1):
        for name in shuffled([*timings.seconds], number):
            way = copy if name == COPY else lambda: pending.append(begin_save(bench))
            seconds = bench.ranks.timed(way)
            finish()
            if number:  # the first touches the memory
                timings.seconds[name].append(seconds)
    return [
        Row(
            group="async",
            subject="asynchronous save blocks, times one copy of the state",
            value=timings.ratio(BLOCKING, COPY),
            target=at_most(1.2),
            how=", ".join(map(timings.millis_text, (BLOCKING, COPY))),
            seconds=timings.seconds,
        )
    ]


def measure_slowdown(bench: Bench) -> list[Row]:
    """Measure how much longer a step takes while a save is written."""
    per_step: dict[str, list[float]] = {ALONE: [], NICE: [], PLAIN: []}
    lasted: dict[str, list[float]] = {NICE: [], PLAIN: []}
    for number in range(bench.repeat + 1):
        for name in shuffled([*per_step], number):
            bench.clear()
            seconds, lasted_s = step_seconds(bench, name)
            if number:
                per_step[name].append(seconds)
                if name in lasted:
                    lasted[name].append(lasted_s)
    steps = Timings(per_step)
    return [
        Row(
            group="slowdown",
            subject=f"a step of compute during a background save, {name}",
            value=steps.ratio(name, ALONE),
            how=f"{bench.words} on {len(os.sched_getaffinity(0))} cores; the save took "
            f"{statistics.median(lasted[name]):.2f} s",
            seconds=per_step if name == NICE else {},
        )
        for name in (NICE, PLAIN)
    ]


def step_seconds(
    bench: Bench, name: str, begin: Begin | None = None
) -> tuple[float, float]:
    """Compute while a save goes on in the background, or alone.

    Parameters
    ----------
    bench : Bench
        All its ranks compute.
    name : str
        How: `ALONE`, `NICE` or `PLAIN`, or what `begin` is called.
    begin : callable, optional
        Begins a peer's save in the background and returns its future.

    Returns
    -------
    float, float
        Seconds of one step, the mean of all ranks; seconds of all steps.
    """
    if name == ALONE:
        end = perf_counter() + _ALONE_S
        return compute_until(bench, lambda: perf_counter() > end)
    with _niceness("0" if name == PLAIN else None):
        if begin is not None:
            pending = begin()
            found = compute_until(bench, pending.done)
        else:
            pending = begin_save(bench)
            found = compute_until(bench, pending.poll)
        pending.result()
    return found


def begin_save(bench: Bench) -> Any:
    """Begin a save in the background."""
    return save_sharded_async(
        bench.state(), bench.checkpoint, step=0, comm=bench.ranks.comm
    )


def compute_until(bench: Bench, is_over: Callable[[], bool]) -> tuple[float, float]:
    """Compute on every rank, alone in its core's cache, until it is over.

    Returns
    -------
    float, float
        Seconds of one step, the mean of all ranks; seconds of all steps.
    """
    values = np.linspace(0.0, 1.0, _STEP_ELEMENTS)
    steps, begin = 0, perf_counter()
    while not is_over():
        for _ in range(_STEP_REPEATS):
            np.sin(values, out=values)
        steps += 1
    seconds = perf_counter() - begin
    mean = bench.ranks.total(seconds / max(steps, 1)) / bench.ranks.size
    return mean, bench.ranks.largest(seconds)


@contextmanager
def _niceness(value: str | None) -> Iterator[None]:
    """Set how nice the threads are that save; None is the library's own choice."""
    before = os.environ.pop(_NICE_VARIABLE, None)
    if value is not None:
        os.environ[_NICE_VARIABLE] = value
    try:
        yield
    finally:
        os.environ.pop(_NICE_VARIABLE, None)
        if before is not None:
            os.environ[_NICE_VARIABLE] = before
