"""MPI program: a training on a directory and a store; says as JSON how it went.

``train_to_store.py SETTINGS``, a JSON object with the fields of `Settings`.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpickpt import (
    CheckpointError,
    CheckpointManager,
    DirectoryTier,
    EverySteps,
    ObjectTier,
    PerRank,
    Replicated,
    Sharded,
)
from mpickpt.parallel import run_tiers

COMM = MPI.COMM_WORLD
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked of it; `report` is where the answer goes."""

    near: str
    url: str
    report: str
    nbytes: int
    steps: int
    keep_near: int | None = None
    keep: int | None = None
    every: int = 1
    bandwidth: str | None = None
    stall_s: float = 60.0
    flush_s: tuple[float | None, ...] = ()


class Model:
    """One rank of a state of which the step determines each bit, on any ranks."""

    def __init__(self, nbytes):
        n = nbytes // 8 // COMM.size
        self.numbers = np.arange(COMM.rank * n, (COMM.rank + 1) * n, dtype="u8")
        self.block = np.zeros(n)
        self.scale = np.zeros(3)
        self.own = np.zeros(1)
        self.step = -1

    def state(self):
        return {
            "model": {"w": Sharded.block(self.block), "scale": Replicated(self.scale)},
            "own": PerRank(self.own, on_resize="first"),
            "step": self.step,
        }

    def train(self, step):
        self.step = step
        self.block.view("u8")[...] = (self.numbers + np.uint64(step << 40)) * GOLDEN
        self.scale[...] = step
        self.own[...] = step

    def is_of(self, step):
        """Tell whether all bits are those of a step, those of NaNs too."""
        other = Model.__new__(Model)
        other.numbers, other.block = self.numbers, np.zeros_like(self.block)
        other.scale, other.own = np.zeros(3), np.zeros(1)
        other.train(step)
        pairs = [
            (self.block, other.block),
            (self.scale, other.scale),
            (self.own, other.own),
        ]
        return self.step == step and all(a.tobytes() == b.tobytes() for a, b in pairs)


def told(call):
    """Return how long a call took and what it returned or raised."""
    begin_s = time.monotonic()
    try:
        outcome = call()
    except CheckpointError as error:
        outcome = f"{type(error).__name__}: {error}"
    return {"outcome": outcome, "took_s": time.monotonic() - begin_s}


def train(settings):
    """Restore, train, flush, close; return what this rank saw."""
    model = Model(settings.nbytes)
    manager = CheckpointManager(
        comm=COMM,
        state=model.state,
        tiers=[
            DirectoryTier(settings.near, keep=settings.keep_near),
            ObjectTier(
                settings.url,
                keep=settings.keep,
                every=settings.every,
                bandwidth=settings.bandwidth,
            ),
        ],
        when=EverySteps(1),
    )
    seen = {"source": "", "is_same": None}
    restored = manager.restore_latest(reshard=True)
    if restored is not None:
        model.step = restored.state["step"]
        seen |= {"source": restored.source, "is_same": model.is_of(restored.step)}
    seen["first"] = manager.next_step
    for step in range(manager.next_step, settings.steps):
        model.train(step)
        manager.save_if_due(step)
    seen["flush"] = [
        told(lambda limit_s=limit_s: manager.flush(timeout_s=limit_s))
        for limit_s in settings.flush_s
    ]
    seen["close"] = told(manager.close)
    return seen


settings = Settings(**json.loads(sys.argv[1]))
run_tiers.STALL_S = settings.stall_s
reports = COMM.gather(train(settings))
if COMM.rank == 0:
    Path(settings.report).write_text(json.dumps(reports))
