"""Dataclasses and namedtuples come back as themselves, where `like` has them."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from mpickpt import (
    PerRank,
    Replicated,
    load_sharded,
    save_sharded,
)


def reloaded(state, path, **options):
    save_sharded(state, path, step=1)
    return load_sharded(path, **options)


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Optimizer:
    step: int
    moments: Any
    derived: float = dataclasses.field(init=False, default=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any


def records(n):
    return {
        "point": Point(n, [n, Point(1, 2)]),
        "optimizer": Optimizer(n, {"m": Replicated(np.full(2, n))}),
        "frozen": Frozen(Replicated(np.full(3, n)), str(n)),
        "inside": Replicated(Point(np.full(1, n), Frozen(n, None))),
        "own": PerRank(Optimizer(n, Point(np.full(4, n), n))),
    }


def test_records_come_back_as_themselves_with_like(tmp_path):
    state, like = records(7), records(0)
    targets = [like["optimizer"].moments["m"].data, like["frozen"].a.data]

    loaded = reloaded(state, tmp_path / "c", like=like)

    assert type(loaded["point"]) is Point
    assert loaded["point"] == state["point"]
    assert type(loaded["point"].y[1]) is Point
    assert type(loaded["optimizer"]) is Optimizer
    assert loaded["optimizer"].step == 7
    assert loaded["optimizer"].moments["m"].data is targets[0]
    assert type(loaded["frozen"]) is Frozen
    assert loaded["frozen"].a.data is targets[1]
    assert loaded["frozen"].b == "7"
    assert targets[0].tolist() == [7, 7]
    assert type(loaded["inside"].data) is Point
    assert loaded["inside"].data.y == Frozen(7, None)
    assert type(loaded["own"].data) is Optimizer
    assert loaded["own"].data.moments.x.tolist() == [7] * 4
    assert loaded["own"].data.moments.y == 7


def test_records_come_back_as_dicts_without_like(tmp_path):
    loaded = reloaded({"p": Point(1, Frozen(2, "x"))}, tmp_path / "c")

    assert loaded == {"p": {"x": 1, "y": {"a": 2, "b": "x"}}}
