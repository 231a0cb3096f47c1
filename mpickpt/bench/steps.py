"""What a manager costs on a step that is not due."""

import os
import statistics
from typing import Any

import numpy as np

from mpickpt.bench.bench import Bench
from mpickpt.bench.rounds import take_turns
from mpickpt.bench.rows import Row
from mpickpt.parallel.manager import CheckpointManager
from mpickpt.planning.interval import EverySteps
from mpickpt.state import Sharded

BARE, MANAGED = "bare Iallreduce", "save_if_due"
_STEPS = 400


def measure_steps(bench: Bench) -> list[Row]:
    """Measure `save_if_due` beyond a bare Iallreduce of one number."""
    count = _STEPS * bench.repeat
    sent, received = np.zeros(1), np.zeros(1)
    tree = {"x": Sharded.block(np.zeros(8))}
    comm = bench.ranks.comm

    def bare() -> None:
        request = comm.Iallreduce(sent, received)
        for _ in range(count):
            _complete(request)
            request = comm.Iallreduce(sent, received)
        _complete(request)

    with CheckpointManager(
        bench.directory / "run", comm, state=lambda: tree, when=EverySteps(1 << 40)
    ) as manager:

        def managed() -> None:
            for step in range(count):
                manager.save_if_due(step)

        timings = take_turns(
            bench.ranks,
            {BARE: bare, MANAGED: managed},
            repeat=bench.repeat,
            before=bench.ranks.barrier,
        )
    rounds = zip(timings.seconds[MANAGED], timings.seconds[BARE], strict=True)
    beyond = statistics.median(managed_s - bare_s for managed_s, bare_s in rounds)
    return [
        Row(
            group="steps",
            subject="a step that is not due, beyond a bare Iallreduce",
            value=beyond / count * 1e6,
            unit="us",
            how=f"bare {timings.median(BARE) / count * 1e6:.1f} us; {count} steps",
            seconds=timings.seconds,
        )
    ]


def _complete(request: Any) -> None:
    """Wait for a request, letting the other rank run where cores are few."""
    while not request.Test():
        os.sched_yield()
