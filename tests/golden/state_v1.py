"""Builds the state that the golden checkpoint of format version 1 holds.

Never edit it: a change of the format gets a state and files of its own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mpickpt import PerRank, Replicated, Sharded

SIZE = 2
STEP = 1234
METADATA = {"note": "golden, version 1", "nested": [1, 2.5, None, "é"]}
METRICS = {"loss": 0.25}

PORTABLE = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("datetime64[ns]", "datetime64[25s]", "timedelta64[D]", "S5", "U3"),
    *(">i2", ">u8", ">f4", ">f8", ">c16", ">U2", ">M8[us]"),
]
FLOATS_OF_ML = [
    *("bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e4m3b11fnuz", "float8_e3m4", "float8_e4m3"),
    "float8_e8m0fnu",
]
ODD_NAMES = [
    *("a/b", ".", "..", "...", "%", "%empty", "1", "-7", "-0", "é", "a\x00b"),
    *("\ud800", "$array", "%2F"),
]


@dataclass
class Limits:
    """A dataclass in the state."""

    low: float
    high: Any


class Point(NamedTuple):
    """A namedtuple in the state."""

    x: int
    y: int


class Counter:
    """A live object in the state: its state is read at save and set at load."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": np.arange(3, dtype=np.int16)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def state(rank: int, size: int = SIZE) -> dict[str, Any]:
    """Return what one of the two ranks saved."""
    return {
        "dtypes": {
            **{name: Replicated(sample(np.dtype(name))) for name in PORTABLE},
            **{name: Replicated(sample_of_ml(name)) for name in FLOATS_OF_ML},
        },
        "sharded": sharded_arrays(rank, size),
        "replicated": Replicated({"w": grid(5, 4), "lr": 0.1, "names": ["a", None]}),
        "own": PerRank(
            {
                "chain": np.arange(3 + 2 * rank, dtype=np.float32),
                "nothing": np.zeros((0, rank), np.int8),
                "rank": rank,
                "only_here": {f"on{rank}": np.array(rank)},
            },
            on_resize="modulo",
        ),
        "generator": PerRank(np.random.default_rng([7, rank]), on_resize="first"),
        "counter": Replicated(Counter(3)),
        "plain": plain_values(),
        "odd": {
            "arrays": Replicated({name: odd_array(name) for name in ODD_NAMES}),
            "values": dict.fromkeys(ODD_NAMES, "odd"),
            "empty": {"": Replicated(np.array([1, 2], np.int8))},
            "numbers": {1: "int", "1": "text", -1: Replicated(np.array(-1.0))},
        },
        "shapes": Replicated(
            {
                "scalar": np.array(2.5),
                "empty": np.zeros((3, 0, 2), np.float64),
                "fortran": np.asfortranarray(grid(4, 3)),
                "strided": np.arange(20, dtype=np.int32)[::3],
                "axes": np.arange(2, dtype=np.int8).reshape((1,) * 31 + (2,)),
            }
        ),
    }


def sharded_arrays(rank: int, size: int) -> dict[str, Any]:
    """Return boxes of global arrays in every form that a state can give them."""
    columns = slice(3 * rank, 3 * rank + 3)
    line = np.arange(10, dtype=np.int64)
    pieces = [[((0,), line[:2]), ((7,), line[7:])], [((2,), line[2:7])]][rank]
    return {
        "rows": Sharded(grid(4, 3)[2 * rank :][:2], (4, 3), (2 * rank, 0)),
        "columns": Sharded(grid(2, 6)[:, columns], (2, 6), (0, 3 * rank)),
        "blocks": Sharded.block(np.arange(3 + rank, dtype=np.uint16) + 3 * rank),
        "pieces": Sharded.pieces(pieces, global_shape=(10,)),
        "on_rank_1": Sharded.pieces(
            [((0, 0), grid(2, 2))] if rank else [], global_shape=(2, 2)
        ),
        "same_box": Sharded(grid(8, 4), (8, 4), (0, 0)),
        "empty": Sharded.block(np.zeros((0, 4), np.float32)),
        "more": [Sharded.block({"m": grid(2, 2), "v": -grid(2, 2)})],
    }


def plain_values() -> dict[str, Any]:
    """Return a plain Python value of each form that the index knows."""
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**53, 2**53 + 1, -(2**100)],
        "floats": [0.1, -0.0, 1e300, float("inf"), float("-inf"), float("nan")],
        "complex": complex(1.5, -0.0),
        "texts": ["", 'é \U0001f600 "\\\n\x00', "a\ud800b"],
        "bytes": b"\x00\xff",
        "tuple": (1, (2, [3, ()])),
        "empty": [{}, [], ()],
        "record": Limits(low=-1.0, high=[None, Point(1, 2)]),
        "scalars": [
            np.float32(0.5),
            np.bool_(True),
            np.datetime64("2026-01-31", "D"),
            np.str_("é"),
            ml_dtypes.bfloat16(1.5),
        ],
    }


def sample(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return eight elements of a dtype, its extremes among them."""
    raw = np.arange(8 * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "b":
        return raw[:8] % 2 == 1
    if dtype.kind in "iumM":
        return (raw * 37).view(dtype)
    if dtype.kind == "S":
        return np.array([b"", b"a", b"ab\xff", b"abcde"] * 2, dtype)
    if dtype.kind == "U":
        return np.array(["", "a", "éa", "\U0001f600"] * 2, dtype)
    return np.array([0.0, -0.0, 1.5, -2.25, np.inf, -np.inf, np.nan, 0.1]).astype(dtype)


def sample_of_ml(name: str) -> np.ndarray[Any, Any]:
    """Return every bit pattern of 8 bits, or some of 16, as a type of ml_dtypes."""
    dtype = np.dtype(getattr(ml_dtypes, name))
    if dtype.itemsize == 1:
        return np.arange(256, dtype=np.uint8).view(dtype)
    return np.arange(0, 65536, 1021, dtype=np.uint16).view(dtype)


def grid(rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Return an array whose elements are all different."""
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def odd_array(name: str) -> np.ndarray[Any, Any]:
    """Return an array that differs from name to name."""
    return np.array([ODD_NAMES.index(name)], np.int16)
