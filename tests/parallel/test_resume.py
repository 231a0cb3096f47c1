"""A run that is stopped and goes on ends exactly as one that was never stopped."""

import random

import numpy as np
import pytest
from mpi4py import MPI

from mpickpt import PerRank, Replicated, Sharded, load_sharded, save_sharded
from tests.states import block_bounds, image_of, shard_digests

SEED = 20260131
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


@pytest.fixture
def part(comm):
    """A communicator of the first half of the ranks; None on the others."""
    n_ranks = (comm.size + 1) // 2
    group = comm.Split(0 if comm.rank < n_ranks else MPI.UNDEFINED, comm.rank)
    yield None if group == MPI.COMM_NULL else group
    if group != MPI.COMM_NULL:
        group.Free()


def streams(rank):
    """Return a random stream of every kind, other ones on every rank."""
    numpy_streams = {
        name: np.random.Generator(getattr(np.random, name)([SEED, rank]))
        for name in BIT_GENERATORS
    }
    return numpy_streams | {
        "RandomState": np.random.RandomState(SEED + rank),
        "Random": random.Random(SEED + rank),
    }


def draws(generators):
    """Return numbers of every stream; an odd count leaves one half of a pair over."""
    drawn = {}
    for name, generator in generators.items():
        if isinstance(generator, random.Random):
            drawn[name] = [generator.gauss(0, 1), generator.random()]
        else:
            drawn[name] = [*generator.standard_normal(3), *generator.permutation(7)]
            if isinstance(generator, np.random.Generator):
                drawn[name] += [*generator.integers(0, 9, 3, np.uint32)]
    return drawn


@pytest.mark.parametrize("wrapped", [True, False], ids=["PerRank", "bare"])
def test_random_streams_go_on_identically(comm, shared_tmp_path, wrapped):
    wrap = PerRank if wrapped else (lambda generators: generators)
    generators, others = streams(comm.rank), streams(comm.rank + 1000)
    draws(generators)
    save_sharded({"rng": wrap(generators)}, shared_tmp_path / "c", step=1, comm=comm)

    load_sharded(shared_tmp_path / "c", comm=comm, like={"rng": wrap(others)})

    own = draws(generators)
    assert draws(others) == own
    everywhere = comm.allgather(repr(own))
    assert len(set(everywhere)) == comm.size


@pytest.mark.parametrize("wrapped", [True, False], ids=["PerRank", "bare"])
def test_chain_that_grew_since_the_template_was_made(comm, shared_tmp_path, wrapped):
    def state(n_steps):
        samples = np.arange(n_steps * 3.0).reshape(n_steps, 3) + comm.rank
        accepted = [(step, step % 3 == comm.rank) for step in range(n_steps)]
        history = {step: {"loss": step / 7} for step in range(n_steps)}
        if wrapped:
            chain = {"x": samples, "a": accepted, "h": history, "rows": [*samples]}
            return {"chain": PerRank(chain)}
        return {"x": PerRank(samples), "a": accepted, "h": history}

    grown = state(5 + comm.rank)
    save_sharded(grown, shared_tmp_path / "c", step=1, comm=comm)

    loaded = load_sharded(shared_tmp_path / "c", comm=comm, like=state(0))
    shrunk = load_sharded(shared_tmp_path / "c", comm=comm, like=state(50))

    assert image_of(loaded) == image_of(grown)
    assert image_of(shrunk) == image_of(grown)


class Training:
    """Noisy descent: replicated weights, sharded moments, a stream on every rank."""

    N = 37

    def __init__(self, comm):
        self.comm = comm
        self.bounds = block_bounds(self.N, comm.rank, comm.size)
        self.weights = np.linspace(-1, 1, self.N)
        self.moments = np.zeros(self.bounds[1] - self.bounds[0], np.float32)
        self.rng = np.random.default_rng([SEED, comm.rank])
        self.losses = []
        self.step = 0

    def state(self):
        return {
            "weights": Replicated(self.weights),
            "moments": Sharded.block(self.moments),
            "rng": PerRank(self.rng),
            "losses": self.losses,
            "step": self.step,
        }

    def train(self, n_steps):
        for _ in range(n_steps):
            noise = self.rng.standard_normal(self.N)
            gradient = self.weights + self.comm.allreduce(noise) / self.comm.size
            own = slice(*self.bounds)
            self.moments += (0.1 * gradient[own]).astype(np.float32)
            steps = np.concatenate(self.comm.allgather(self.moments))
            self.weights -= 0.01 * steps
            self.losses.append(float(np.square(self.weights).sum()))
            self.step += 1

    def restore(self, path):
        loaded = load_sharded(path, comm=self.comm, like=self.state())
        self.losses, self.step = loaded["losses"], loaded["step"]


def test_training_goes_on_bit_for_bit(comm, shared_tmp_path):
    unbroken, first, second = (Training(comm) for _ in range(3))
    unbroken.train(9)
    first.train(4)
    save_sharded(first.state(), shared_tmp_path / "4", step=4, comm=comm)

    second.restore(shared_tmp_path / "4")
    second.train(5)

    assert image_of(second.state()["weights"]) == image_of(unbroken.state()["weights"])
    assert second.losses == unbroken.losses
    for name, training in (("a", unbroken), ("b", second)):
        save_sharded(training.state(), shared_tmp_path / name, step=9, comm=comm)
    assert shard_digests(shared_tmp_path / "a") == shard_digests(shared_tmp_path / "b")


class Diffusion:
    """Heat on a ring, cut in blocks of rows; no element depends on the cuts."""

    SHAPE = (19, 4)

    def __init__(self, comm):
        self.comm = comm
        self.bounds = block_bounds(self.SHAPE[0], comm.rank, comm.size)
        rng = np.random.default_rng(SEED)
        self.field = rng.random(self.SHAPE)[slice(*self.bounds)].copy()
        self.step = 0

    def state(self):
        field = Sharded(self.field, self.SHAPE, (self.bounds[0], 0))
        return {"field": field, "step": self.step}

    def advance(self, n_steps):
        for _ in range(n_steps):
            whole = self.whole()
            around = np.roll(whole, 1, 0) + np.roll(whole, -1, 0) - 2 * whole
            self.field += 0.2 * around[slice(*self.bounds)]
            self.step += 1

    def whole(self):
        return np.concatenate(self.comm.allgather(self.field))


@pytest.mark.parametrize("grows", [True, False])
def test_simulation_goes_on_bit_for_bit_on_another_number_of_ranks(
    comm, part, shared_tmp_path, grows
):
    before, after = (part, comm) if grows else (comm, part)
    unbroken = Diffusion(comm)
    unbroken.advance(7)
    if before is not None:
        first = Diffusion(before)
        first.advance(3)
        save_sharded(first.state(), shared_tmp_path / "c", step=3, comm=before)
    comm.Barrier()
    found, step = None, 7

    if after is not None:
        second = Diffusion(after)
        second.field[...] = 0
        loaded = load_sharded(
            shared_tmp_path / "c", comm=after, like=second.state(), reshard=True
        )
        second.step = loaded["step"]
        second.advance(4)
        found, step = second.whole(), second.step

    whole = unbroken.whole()
    assert step == 7
    assert found is None or found.tobytes() == whole.tobytes()


N_LAYERS = 9


def stage(rank, size, *, empty=False):
    """Return the layers of one pipeline stage; other ranks do not have their keys."""
    layers = {}
    for i in range(*block_bounds(N_LAYERS, rank, size)):
        weights = np.zeros((3, 2)) if empty else np.arange(6.0).reshape(3, 2) + 100 * i
        layers[f"layer{i}"] = {
            "w": Sharded(weights, (3, 2), (0, 0)),
            "b": Replicated(np.full(2, 0 if empty else i)),
            "name": Replicated("" if empty else f"layer {i}"),
            i: {"frozen": not empty},
        }
    first = {"embedding": Replicated(np.zeros(4) + (not empty))}
    return {"layers": layers, "step": 0 if empty else 7} | (first if not rank else {})


def test_pipeline_stages_go_on_with_their_own_keys(comm, shared_tmp_path):
    expected = stage(comm.rank, comm.size)
    save_sharded(expected, shared_tmp_path / "c", step=1, comm=comm)

    loaded = load_sharded(
        shared_tmp_path / "c", comm=comm, like=stage(comm.rank, comm.size, empty=True)
    )
    without_like = load_sharded(shared_tmp_path / "c", comm=comm)

    assert image_of(loaded) == image_of(expected)
    assert image_of(without_like) == image_of(expected)


@pytest.mark.parametrize("grows", [True, False])
def test_pipeline_stages_move_to_another_number_of_ranks(
    comm, part, shared_tmp_path, grows
):
    before, after = (part, comm) if grows else (comm, part)
    if before is not None:
        state = stage(before.rank, before.size)
        save_sharded(state, shared_tmp_path / "c", step=1, comm=before)
    comm.Barrier()
    loaded = expected = None

    if after is not None:
        like = stage(after.rank, after.size, empty=True)
        loaded = load_sharded(
            shared_tmp_path / "c", comm=after, like=like, reshard=True
        )
        expected = stage(after.rank, after.size)

    assert image_of(loaded) == image_of(expected)


def test_pipeline_stages_move_between_ranks_of_the_same_world(comm, shared_tmp_path):
    save_sharded(stage(comm.rank, comm.size), shared_tmp_path / "c", step=1, comm=comm)
    other = comm.size - 1 - comm.rank

    loaded = load_sharded(
        shared_tmp_path / "c",
        comm=comm,
        like=stage(other, comm.size, empty=True),
        reshard=True,
    )

    assert image_of(loaded) == image_of(stage(other, comm.size))
