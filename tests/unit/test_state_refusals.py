"""Values that cannot be saved are refused with their key, alike on every rank."""

import enum
from typing import Any

import numpy as np
import pytest

from mpickpt import (
    AsSaved,
    LayoutError,
    PerRank,
    Replicated,
    Sharded,
    StateTypeError,
    save_sharded,
)
from tests.states import (
    failure_on_ranks,
    image_of,
)


class Color(enum.IntEnum):
    RED = 1


REFUSED = {
    "object array": Replicated(np.array([None, 1], object)),
    "structured array": Replicated(np.zeros(2, [("a", "i4"), ("b", "f8")])),
    "structured scalar": np.zeros((), [("a", "i4")])[()],
    "void array": Replicated(np.zeros(2, "V3")),
    "set": {1, 2},
    "dict key of 5,000 digits": {10**5000: 1},
    "frozenset": frozenset(),
    "function": image_of,
    "lambda": lambda: 0,
    "class": dict,
    "module": np,
    "range": range(3),
    "bytearray": bytearray(b"x"),
    "enumeration": Color.RED,
    "subclass of str": type("Text", (str,), {})("x"),
    "AsSaved": AsSaved,
    "spec": Sharded.spec((1,), (1,), (0,), "f4"),
    "wrapper in a wrapper": Replicated({"a": PerRank(1)}),
    "wrapper in the same": PerRank([PerRank(np.ones(1))]),
    "sharded in a wrapper": Replicated(Sharded.block(np.ones(1))),
    "masked array": Replicated(np.ma.array([1, 2], mask=[False, True])),
    "sharded list": Sharded.block([1.0, 2.0]),
    "sharded scalar": Sharded(np.float64(1), (1,), (0,)),
    "pieces of lists": Sharded.pieces([((0,), [1, 2])], global_shape=(2,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_value_that_cannot_be_saved_is_refused_with_its_key(tmp_path, name):
    state = {"good": 1, "outer": [{"a/b": REFUSED[name]}]}

    failure = failure_on_ranks(
        2, lambda comm: save_sharded(state, tmp_path / "c", step=1, comm=comm)
    )

    assert isinstance(failure, TypeError)
    assert isinstance(failure, StateTypeError)
    assert failure.key.startswith("outer/0/a%2Fb")
    assert "outer/0/a%2Fb" in str(failure)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("key", [None, 1.5, True, (1,), b"x", np.int64(1)])
def test_dict_key_that_is_neither_text_nor_int_is_refused(tmp_path, key):
    with pytest.raises(StateTypeError, match="outer") as caught:
        save_sharded({"outer": {key: 1}}, tmp_path / "c", step=1)

    assert caught.value.key == "outer"


def test_bare_array_on_several_ranks_is_refused_with_the_three_choices(tmp_path):
    failure = failure_on_ranks(
        2,
        lambda comm: save_sharded(
            {"model": {"w": np.ones(3)}}, tmp_path / "c", step=1, comm=comm
        ),
    )

    assert isinstance(failure, TypeError)
    assert failure.key == "model/w"
    for choice in ("model/w", "Sharded(", "Replicated(", "PerRank("):
        assert choice in str(failure)


def test_value_refused_on_one_rank_is_refused_on_all(tmp_path):
    failure = failure_on_ranks(
        3,
        lambda comm: save_sharded(
            {"x": {1} if comm.rank == 1 else 1}, tmp_path / "c", step=1, comm=comm
        ),
    )

    assert isinstance(failure, StateTypeError)
    assert failure.key == "x"
    assert failure.rank == 1


def test_state_that_contains_itself_is_refused(tmp_path):
    state: dict[str, Any] = {}
    state["a"] = [state]

    with pytest.raises(StateTypeError, match="contain itself"):
        save_sharded(state, tmp_path / "c", step=1)


@pytest.mark.parametrize(
    ("wrapper", "offset"),
    [(Sharded(np.ones(3), (4,), (2,)), "(2,)"), (Sharded(np.ones(3), (4,), (-1,)), "")],
    ids=["past the end", "before the start"],
)
def test_box_outside_its_array_is_refused(tmp_path, wrapper, offset):
    with pytest.raises(LayoutError, match="inside") as caught:
        save_sharded({"x": wrapper}, tmp_path / "c", step=1)

    assert caught.value.key == "x"
    assert offset in str(caught.value)


def test_sharded_without_place_is_refused():
    with pytest.raises(TypeError, match=r"Sharded\.block"):
        Sharded(np.ones(3))


@pytest.mark.parametrize(
    "data",
    [
        Sharded(np.ones(1), (2**63,), (0,)),
        Sharded(np.ones(1), (2,), (-1,)),
        Sharded.pieces([], global_shape=(2**63,), dtype="f4"),
        Sharded.pieces([], global_shape=(-1,), dtype="f4"),
    ],
)
def test_shape_that_cannot_be_is_refused_on_all_ranks(tmp_path, data):
    def save_one(comm):
        good = Sharded(np.ones(1), (1,), (0,))
        tree = {"x": data if comm.rank == 1 else good}
        save_sharded(tree, tmp_path / "c", step=1, comm=comm)

    failure = failure_on_ranks(2, save_one)

    assert isinstance(failure, LayoutError)
    assert failure.key == "x"
    assert failure.rank == 1


def test_offset_is_an_integer_of_any_kind_but_no_float():
    one = Sharded.pieces([(np.int64(3), np.ones(1))], global_shape=np.array([5]))

    assert one.global_shape == (5,)
    assert one.boxes[0][0] == (3,)
    assert Sharded(np.ones(1), np.int32(5), np.uint8(3)).offset == (3,)
    with pytest.raises(TypeError):
        Sharded(np.ones(1), (5,), (2.5,))
