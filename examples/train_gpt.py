"""Train a small GPT on many ranks, lose one of them, and go on as if nothing was lost.

::

    mpiexec -n 4 python -m mpi4py examples/train_gpt.py --steps 40

It trains a character-level GPT, written in numpy alone, on the text that every
Python carries in `pydoc_data.topics`. The same command again goes on from the
newest checkpoint that is whole. `-m mpi4py` is good practice: an error on one rank
then ends the job instead of leaving the others waiting for it. The batch scripts in
`slurm/` run it as it is: told that its time is up, it saves and exits with status 85.

How the state lies on the ranks, as in any mixed-precision job with ZeRO stage 1:

- fp16 parameters: the same on every rank;
- fp32 master weights and the two Adam moments: one flat partition a rank, uneven
  where it does not divide, and nothing at all on the last of very many ranks;
- the random stream that draws the batches: another one on every rank.

`Training.state` says just that to the library, and is all that it needs to know.
For a given number of ranks (and one Python: each version has its own text) the run is
deterministic to the last bit, whether or not it was broken and resumed: the digest
that it prints at the end is the proof.
"""

import os

# Many ranks share few cores: one BLAS thread each, and who waits lets others run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")

import argparse
import hashlib
import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from mpi4py import MPI

import mpickpt
from mpickpt import CheckpointManager, EverySteps, PerRank, Replicated, Sharded

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 128, 64, 64, 4, 2
BATCH, LEARNING_RATE, WARM_UP_STEPS = 8, 4e-3, 8
GRAIN = 4096  # elements; partitions are cut at its multiples only

TEXT = np.frombuffer("".join(topics.values()).encode("ascii", "replace"), np.uint8)


def main() -> int:
    """Resume if there is something to resume, train, and print the final digest."""
    args = parse_args()
    comm = MPI.COMM_WORLD
    run = args.run or Path("runs", f"train_gpt-{comm.size}-ranks")
    job = Training(comm, args.seed)
    try:
        with CheckpointManager(
            run,
            comm,
            state=job.state,
            keep=args.keep,
            when=EverySteps(args.every),
            asynchronous=not args.wait,
        ) as checkpoints:
            resume(job, checkpoints, args)
            train(job, checkpoints, args)
    except mpickpt.CollectiveTimeoutError:
        raise  # a rank is lost: each survivor fails for itself, and `-m mpi4py` aborts
    except mpickpt.CheckpointError as error:
        # Every rank has raised this same error: rank 0 says so, and fails for all.
        if comm.rank == 0:
            sys.exit(f"{type(error).__name__}: {error}")
        return 0
    if checkpoints.should_stop:
        say(comm, f"stopped after step {job.step}, which is saved")
    else:
        say(comm, "arrays {}\ndigest {}".format(*digests(job)))
    return checkpoints.exit_code


def parse_args() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a small GPT with checkpoints.")
    option = parser.add_argument
    option("--run", type=Path, help="run directory (default: one per world size)")
    option("--steps", type=int, default=40, help="train up to this step")
    option("--seed", type=int, default=20260131, help="another seed, another run")
    option("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    option("--keep", type=int, help="only the newest so many checkpoints")
    option("--wait", action="store_true", help="wait until a checkpoint is durable")
    option("--reshard", action="store_true", help="accept another number of ranks")
    option("--restore", type=int, metavar="STEP", help="go on from this step, or fail")
    option("--kill-rank", type=int, help="this rank SIGKILLs itself")
    option("--kill-step", type=int, help="in the middle of this step")
    return parser.parse_args()


def resume(
    job: "Training", checkpoints: CheckpointManager, args: argparse.Namespace
) -> None:
    """Fill `job` from the newest checkpoint that is whole, if there is one."""
    comm = job.comm
    if args.restore is not None:
        restored = checkpoints.restore(args.restore, reshard=args.reshard)
    else:
        restored = checkpoints.restore_latest(reshard=args.reshard)
    if restored is None:
        say(comm, f"starting from step 0 on {comm.size} ranks")
        return
    job.step, job.losses = restored.state["step"], restored.state["losses"]
    say(comm, f"resumed from step {job.step} on {comm.size} ranks")
    say(comm, "loaded arrays {}".format(*digests(job)))


def train(
    job: "Training", checkpoints: CheckpointManager, args: argparse.Namespace
) -> None:
    """Train up to step `args.steps`, or until the job is told to stop."""
    comm = job.comm
    owners = sum(count > 0 for count in job.counts)
    say(comm, f"{job.half.size} parameters, owned by {owners} of {comm.size} ranks")
    while job.step < args.steps and not checkpoints.should_stop:
        loss, gradient = job.gradient()
        if (comm.rank, job.step + 1) == (args.kill_rank, args.kill_step):
            os.kill(os.getpid(), signal.SIGKILL)  # gone, as with its node: no goodbye
        job.update(loss, gradient)
        if job.step in (1, args.steps) or job.step % 5 == 0:
            say(comm, f"step {job.step:3d}  loss {job.losses[-1]:.4f}")
        is_saved = checkpoints.save_if_due(job.step)
        if job.step == args.steps and not is_saved:
            checkpoints.save(job.step)


def say(comm: MPI.Intracomm, text: str) -> None:
    """Print on rank 0 only."""
    if comm.rank == 0:
        print(text, flush=True)


class Training:
    """What changes from step to step, and the two halves of a step.

    Attributes
    ----------
    half : ndarray of float16, shape (N,)
        All parameters, one after another in the order of `SHAPES`.
    counts : list of int
        How many of the N elements each rank owns.
    master, mean, square : ndarray of float32, shape (counts[rank],)
        This rank's partition of master weights and Adam moments.
    """

    def __init__(self, comm: MPI.Intracomm, seed: int) -> None:
        self.comm = comm
        self.step = 0
        self.losses: list[float] = []
        # The world size is part of the seed: when it changes, every rank keeps its new
        # stream, and none draws the batches of the first steps a second time.
        self.rng = np.random.default_rng([seed, comm.size, comm.rank])
        self.half = initial_parameters(seed).astype(np.float16)
        self.counts = partition(self.half.size, comm.size)
        start = sum(self.counts[: comm.rank])
        mine = self.half[start : start + self.counts[comm.rank]]
        self.master = mine.astype(np.float32)
        self.mean = np.zeros_like(self.master)
        self.square = np.zeros_like(self.master)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, each part saying whose it is."""
        return {
            "model": Replicated(named(self.half)),
            "adam": {
                "master": Sharded.block(self.master),
                "mean": Sharded.block(self.mean),
                "square": Sharded.block(self.square),
            },
            "rng": PerRank(self.rng, on_resize="keep"),
            "step": self.step,
            "losses": self.losses,
        }

    def gradient(self) -> tuple[float, np.ndarray]:
        """Return loss and gradient, float32, shape (N,), of a batch of this rank."""
        starts = self.rng.integers(TEXT.size - CONTEXT, size=(BATCH, 1))
        text = TEXT[starts + np.arange(CONTEXT + 1)]
        gradient = np.zeros(self.half.size, np.float32)
        loss = back_propagate(self.half.astype(np.float32), gradient, text)
        return loss, gradient

    def update(self, loss: float, gradient: np.ndarray) -> None:
        """Take one Adam step on this rank's partition; collect everyone's parameters.

        Collective: the gradient's Allreduce, in the two halves that ZeRO makes of it.
        """
        # MPI may sum in any order; to receive all and sum here fixes the order.
        received = np.empty((self.comm.size, self.master.size), np.float32)
        self.comm.Alltoallv([gradient, self.counts], received)
        grad = received.sum(axis=0) / np.float32(self.comm.size)
        self.losses.append(sum(self.comm.allgather(loss)) / self.comm.size)
        self.step += 1

        self.mean += 0.1 * (grad - self.mean)
        self.square += 0.02 * (grad * grad - self.square)
        mean = self.mean / (1 - 0.9**self.step)
        square = self.square / (1 - 0.98**self.step)
        rate = LEARNING_RATE * min(1.0, self.step / WARM_UP_STEPS)
        self.master -= rate * mean / (np.sqrt(square) + 1e-8)

        # MPI knows no 16-bit float; to carry them, any 16-bit type will do.
        sent = self.master.astype(np.float16).view(np.uint16)
        self.comm.Allgatherv(sent, [self.half.view(np.uint16), self.counts])


def partition(numel: int, size: int) -> list[int]:
    """Return how many elements each rank owns: even shares of whole grains."""
    share = math.ceil(numel / GRAIN / size) * GRAIN
    return [min(share, max(0, numel - rank * share)) for rank in range(size)]


def digests(job: Training) -> tuple[str, str]:
    """Return SHA-256 of parameters, masters and moments, and of these and the streams.

    Collective. The first does not depend on how many ranks hold the arrays.
    """
    stream = json.dumps(job.rng.bit_generator.state, sort_keys=True).encode()
    parts = job.comm.allgather((job.master, job.mean, job.square, stream))
    masters, means, squares, streams = zip(*parts, strict=True)
    arrays = hashlib.sha256(job.half)
    for part in (*masters, *means, *squares):
        arrays.update(part)
    everything = arrays.copy()
    everything.update(b"".join(streams))
    return arrays.hexdigest(), everything.hexdigest()


# The model. A layer takes x, last, and returns y and the way back: a function that
# takes dL/dy, returns dL/dx and adds dL/dw to the gradients of the layer's weights.

Backward = Callable[[np.ndarray], Any]
Step = tuple[np.ndarray, Backward]
Layer = Callable[[np.ndarray], Step]

SHAPES: dict[str, tuple[int, ...]] = {
    "token": (VOCAB, WIDTH),
    "place": (CONTEXT, WIDTH),
    "norm": (2, WIDTH),  # the two rows of a norm are its scale and its shift
}
for _i in range(LAYERS):
    SHAPES[f"block{_i}.attention.norm"] = (2, WIDTH)
    SHAPES[f"block{_i}.attention.qkv"] = (WIDTH, 3 * WIDTH)
    SHAPES[f"block{_i}.attention.out"] = (WIDTH, WIDTH)
    SHAPES[f"block{_i}.mlp.norm"] = (2, WIDTH)
    SHAPES[f"block{_i}.mlp.up"] = (WIDTH, 4 * WIDTH)
    SHAPES[f"block{_i}.mlp.down"] = (4 * WIDTH, WIDTH)


def named(flat: np.ndarray) -> dict[str, np.ndarray]:
    """Return the parameters as views of the flat array that holds them all."""
    ends = np.cumsum([math.prod(shape) for shape in SHAPES.values()])
    views = zip(SHAPES.items(), np.split(flat, ends[:-1]), strict=True)
    return {name: view.reshape(shape) for (name, shape), view in views}


def initial_parameters(seed: int) -> np.ndarray:
    """Return the parameters of step 0, flat; the same on every rank."""
    flat = np.empty(sum(map(math.prod, SHAPES.values())))
    rng = np.random.default_rng(seed)
    for name, view in named(flat).items():
        is_norm = name.endswith("norm")
        view[:] = [[1], [0]] if is_norm else 0.05 * rng.standard_normal(view.shape)
    return flat


def back_propagate(flat: np.ndarray, gradient: np.ndarray, text: np.ndarray) -> float:
    """Add to `gradient` that of the mean loss, which is returned, over the text."""
    values, grads = named(flat), named(gradient)
    logits, backward = gpt(
        {name: Weight(values[name], grads[name]) for name in SHAPES}, text[:, :-1]
    )
    loss, dlogits = cross_entropy(logits, text[:, 1:])
    backward(dlogits)
    return loss


@dataclass(slots=True)
class Weight:
    """One named parameter and the place where its gradient is summed."""

    value: np.ndarray
    grad: np.ndarray


def gpt(w: dict[str, Weight], tokens: np.ndarray) -> Step:
    """Make logits, shape (batch, context, VOCAB), of tokens, (batch, context)."""
    layers: list[Layer] = [partial(embedding, w["token"], w["place"])]
    for i in range(LAYERS):
        qkv, out = w[f"block{i}.attention.qkv"], w[f"block{i}.attention.out"]
        before = partial(norm, w[f"block{i}.attention.norm"])
        heads = [before, partial(linear, qkv), attention, partial(linear, out)]
        up, down = w[f"block{i}.mlp.up"], w[f"block{i}.mlp.down"]
        before = partial(norm, w[f"block{i}.mlp.norm"])
        mlp = [before, partial(linear, up), relu, partial(linear, down)]
        layers += [partial(residual, heads), partial(residual, mlp)]
    tied = Weight(w["token"].value.T, w["token"].grad.T)
    return chain([*layers, partial(norm, w["norm"]), partial(linear, tied)], tokens)


def chain(layers: Sequence[Layer], x: np.ndarray) -> Step:
    """Apply the layers one after another."""
    backwards = []
    for layer in layers:
        x, back = layer(x)
        backwards.append(back)

    def backward(dy: np.ndarray) -> np.ndarray:
        for back in reversed(backwards):
            dy = back(dy)
        return dy

    return x, backward


def residual(layers: Sequence[Layer], x: np.ndarray) -> Step:
    """Add to x what the layers make of it."""
    y, back = chain(layers, x)
    return x + y, lambda dz: dz + back(dz)


def embedding(token: Weight, place: Weight, tokens: np.ndarray) -> Step:
    """Add up the vectors of what each token is and of where it stands."""

    def backward(dy: np.ndarray) -> None:
        np.add.at(token.grad, tokens, dy)
        place.grad += dy.sum(axis=0)

    return token.value[tokens] + place.value, backward


def linear(weight: Weight, x: np.ndarray) -> Step:
    """Multiply x by the weight."""

    def backward(dy: np.ndarray) -> np.ndarray:
        weight.grad += rows(x).T @ rows(dy)
        return dy @ weight.value.T

    return x @ weight.value, backward


def norm(weight: Weight, x: np.ndarray) -> Step:
    """Bring each vector to mean 0 and variance 1, then scale and shift it."""
    scale, shift = weight.value
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    z = centred * inverse

    def backward(dy: np.ndarray) -> np.ndarray:
        weight.grad += rows(dy * z).sum(axis=0), rows(dy).sum(axis=0)
        dz = dy * scale
        along_z = z * (dz * z).mean(axis=-1, keepdims=True)
        return inverse * (dz - dz.mean(axis=-1, keepdims=True) - along_z)

    return z * scale + shift, backward


def relu(x: np.ndarray) -> Step:
    """Keep x where it is positive."""
    return np.maximum(x, 0), lambda dy: dy * (x > 0)


def attention(qkv: np.ndarray) -> Step:
    """Let each token look at itself and those before it."""
    batch, context, _ = qkv.shape
    split = (batch, context, 3, HEADS, WIDTH // HEADS)
    q, k, v = qkv.reshape(split).transpose(2, 0, 3, 1, 4)
    future = np.triu(np.full((context, context), -np.inf, qkv.dtype), 1)
    scale = (WIDTH // HEADS) ** -0.5
    weights = np.exp(log_softmax(q @ turned(k) * scale + future))

    def backward(dy: np.ndarray) -> np.ndarray:
        dy = dy.reshape(batch, context, HEADS, -1).swapaxes(1, 2)
        dweights = dy @ turned(v)
        mean = (dweights * weights).sum(axis=-1, keepdims=True)
        dscores = weights * (dweights - mean) * scale
        dqkv = np.stack([dscores @ k, turned(dscores) @ q, turned(weights) @ dy])
        return dqkv.transpose(1, 3, 0, 2, 4).reshape(qkv.shape)

    return (weights @ v).swapaxes(1, 2).reshape(batch, context, WIDTH), backward


def cross_entropy(logits: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean of -log p(target), and its gradient by the logits."""
    log_p = log_softmax(logits)
    at_targets = (*np.indices(targets.shape), targets)
    gradient = np.exp(log_p)
    gradient[at_targets] -= 1
    return -float(log_p[at_targets].mean()), gradient / targets.size


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Return the logarithm of the softmax along the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def rows(x: np.ndarray) -> np.ndarray:
    """Return x as the matrix of its vectors along the last axis."""
    return x.reshape(-1, x.shape[-1])


def turned(x: np.ndarray) -> np.ndarray:
    """Return x with its last two axes exchanged."""
    return x.swapaxes(-1, -2)


if __name__ == "__main__":
    status = main()
    # Exiting with a status aborts MPI under `-m mpi4py`, unless it is finalized; srun
    # answers an abort with a kill, and a requested requeue, 85, would look like 137.
    MPI.Finalize()
    sys.exit(status)
