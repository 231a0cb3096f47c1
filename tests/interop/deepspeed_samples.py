"""Runs DeepSpeed to make checkpoints, and tells how an import differs from it."""

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import mpickpt
from mpickpt.interop.deepspeed.importer import deepspeed
from tests.mpi_launch import finish, start

PROGRAMS = Path(__file__).with_name("programs")
TAG = "global_step2"
UNIVERSAL = "global_step2_universal"
STEP_CASES = tuple(
    f"zero{stage}-{dtype}" for stage in range(4) for dtype in ("fp16", "bf16", "fp32")
)
MORE_CASES = ("round-robin", "subgroups", "persistent", "bf16-optimizer")
UNIVERSAL_CASES = ("zero1-bf16", "zero2-fp16", "zero3-bf16", "subgroups")
TENSOR_PARALLEL_CASES = ("tensor-parallel-zero1", "tensor-parallel-zero3")
TIMEOUT_S = 280

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def make(folder, size, *cases):
    """Have DeepSpeed on `size` ranks save the cases, by default all."""
    program = str(PROGRAMS / "make_deepspeed.py")
    outcome = finish(
        start(["-m", "mpi4py", program, str(folder), *cases], size=size), TIMEOUT_S
    )
    assert outcome.output.rstrip().endswith("MADE"), outcome.output[-10_000:]
    return folder


@cache
def expected(folder):
    """Return what DeepSpeed loads of a checkpoint, by part and name, as bytes."""
    with np.load(folder / "expected.npz") as held:
        return {tuple(key.split("/", 1)): held[key] for key in held}


def imported(folder, target, tag=TAG, **how):
    """Import a checkpoint by this process alone and return its state."""
    deepspeed(folder, target, tag=tag, **how)
    return loaded(target)


def loaded(target):
    with mpickpt.open_checkpoint(target) as checkpoint:
        return checkpoint.load()


def differences(state, folder):
    """Return part and name of what is not as DeepSpeed loads it."""
    return [
        key
        for key, value in expected(folder).items()
        if not is_same(part_of(state, *key), value)
    ]


def part_of(state, part, name):
    """Return an array of an imported state; None where there is none."""
    if part in ("model", "master"):
        return state[part].get(name)
    return state["optimizer"]["state"].get(name, {}).get(part)


def is_same(array, raw):
    return (
        array is not None
        and array.shape == raw.shape
        and array.dtype.itemsize == raw.dtype.itemsize
        and array.tobytes() == raw.tobytes()
    )
