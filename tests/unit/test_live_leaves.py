"""Generators and objects with a state_dict go on with the state that was saved."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from mpickpt import (
    PerRank,
    Replicated,
    Sharded,
    StateTypeError,
    load_sharded,
    save_sharded,
)
from tests.states import (
    arrays_in,
    block_bounds,
    image_of,
    on_ranks,
)


def reloaded(state, path, **options):
    save_sharded(state, path, step=1)
    return load_sharded(path, **options)


class Counter:
    """An object whose state can be read and set."""

    def __init__(self, count, weights=()):
        self.count = count
        self.weights = weights

    def state_dict(self):
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.weights = state["weights"]


BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
GENERATORS = {
    **{
        name: lambda seed, name=name: np.random.Generator(
            getattr(np.random, name)(seed)
        )
        for name in BIT_GENERATORS
    },
    "RandomState": np.random.RandomState,
    "Random": random.Random,
}


def draws(generator):
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.getrandbits(99)]
    normal = getattr(generator, "standard_normal", None)
    return [*normal(5).tolist(), generator.bytes(3), *generator.permutation(9).tolist()]


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "PerRank"])
@pytest.mark.parametrize("name", GENERATORS)
def test_generator_goes_on_where_it_was_saved(tmp_path, name, wrapped):
    wrap = PerRank if wrapped else (lambda generator: generator)

    def save_draw_and_load(comm):
        generator = GENERATORS[name](comm.rank)
        draws(generator)
        save_sharded({"rng": wrap(generator)}, tmp_path / "c", step=1, comm=comm)
        expected = draws(generator)
        other = GENERATORS[name](99)
        loaded = load_sharded(tmp_path / "c", comm=comm, like={"rng": wrap(other)})
        found = loaded["rng"].data if wrapped else loaded["rng"]
        return found is other, draws(other) == expected, expected

    outcomes = on_ranks(2, save_draw_and_load)

    assert [outcome[:2] for outcome in outcomes] == [(True, True)] * 2
    assert outcomes[0][2] != outcomes[1][2]


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_bit_generator_goes_on_where_it_was_saved(tmp_path, name):
    bits = getattr(np.random, name)(3)
    save_sharded({"bits": bits}, tmp_path / "c", step=1)
    expected = bits.random_raw(5).tolist()
    other = getattr(np.random, name)(4)

    load_sharded(tmp_path / "c", like={"bits": other})

    assert other.random_raw(5).tolist() == expected


@pytest.mark.parametrize("wrapper", [PerRank, Replicated])
def test_object_with_state_dict_is_given_its_state(tmp_path, wrapper):
    def save_and_load(comm):
        saved = Counter(5, [np.arange(3), {"a": None}])
        save_sharded({"c": wrapper(saved)}, tmp_path / "c", step=1, comm=comm)
        other = Counter(0, [np.zeros(3, int), {"a": 1}])
        loaded = load_sharded(tmp_path / "c", comm=comm, like={"c": wrapper(other)})
        return loaded["c"].data is other, image_of(other.state_dict())

    outcomes = on_ranks(2, save_and_load)

    expected = image_of({"count": 5, "weights": [np.arange(3), {"a": None}]})
    assert outcomes == [(True, expected)] * 2


def test_object_is_given_a_state_of_another_form_than_its_own(tmp_path):
    saved = Counter(5, {"a": [np.arange(3)], "b": "text"})
    save_sharded({"c": saved}, tmp_path / "c", step=1)
    other = Counter(0, ())

    load_sharded(tmp_path / "c", like={"c": other})

    assert image_of(other.state_dict()) == image_of(saved.state_dict())


def test_state_of_an_object_comes_back_as_a_dict_without_like(tmp_path):
    loaded = reloaded({"c": PerRank(Counter(5, [1]))}, tmp_path / "c")

    assert image_of(loaded) == image_of({"c": PerRank({"count": 5, "weights": [1]})})


@pytest.mark.parametrize("name", GENERATORS)
def test_replicated_generator_goes_on_alike_on_more_ranks(tmp_path, name):
    def save(comm):
        state = {"rng": Replicated(GENERATORS[name](7))}
        save_sharded(state, tmp_path / "c", step=1, comm=comm)

    def load_and_draw(comm):
        other = GENERATORS[name](comm.rank)
        like = {"rng": Replicated(other)}
        load_sharded(tmp_path / "c", comm=comm, like=like, reshard=True)
        return draws(other)

    on_ranks(2, save)

    assert on_ranks(3, load_and_draw) == [draws(GENERATORS[name](7))] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_object_may_say_itself_whose_its_arrays_are(tmp_path, size):
    def model(rank, size, *, fill=None):
        start, stop = block_bounds(5, rank, size)
        rows = np.arange(start, stop) if fill is None else np.full(stop - start, fill)
        bias = np.arange(3) if fill is None else np.full(3, fill)
        weights = {"w": Sharded(rows, (5,), (start,)), "b": Replicated(bias)}
        return Counter(4 if fill is None else fill, weights)

    def save(comm):
        state = {"model": model(comm.rank, 2)}
        save_sharded(state, tmp_path / "c", step=1, comm=comm)

    def load(comm):
        other = model(comm.rank, size, fill=9)
        arrays = arrays_in(other.weights)
        load_sharded(tmp_path / "c", comm=comm, like={"model": other}, reshard=True)
        found = arrays_in(other.weights)
        same = all(a is b for a, b in zip(found, arrays, strict=True))
        return same, image_of(other.state_dict())

    on_ranks(2, save)

    expected = [(True, image_of(model(r, size).state_dict())) for r in range(size)]
    assert on_ranks(size, load) == expected


def test_generator_of_another_kind_is_refused(tmp_path):
    save_sharded({"rng": np.random.default_rng(1)}, tmp_path / "c", step=1)
    other = np.random.Generator(np.random.SFC64(1))

    with pytest.raises(StateTypeError, match="Generator"):
        load_sharded(tmp_path / "c", like={"rng": other})


@dataclasses.dataclass
class Sampler:
    position: int
    read: Any = print

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_object_that_is_a_dataclass_says_itself_what_its_state_is(tmp_path):
    save_sharded({"sampler": Sampler(5)}, tmp_path / "c", step=1)
    other = Sampler(0)

    loaded = load_sharded(tmp_path / "c", like={"sampler": other})

    assert loaded["sampler"] is other
    assert other.position == 5
