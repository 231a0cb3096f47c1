"""Train a small GPT of PyTorch on many ranks, lose one of them, and go on.

::

    mpiexec -n 4 python -m mpi4py examples/train_torch.py --steps 40 [--fsdp]

It trains a character-level GPT on the text that every Python carries in
`pydoc_data.topics`, on CPUs, so that it runs anywhere. The same command again goes on
from the newest checkpoint that is whole; with ``--reshard`` also on another number of
ranks. `train_gpt.py` is the same in numpy, for those who want to see every byte.

The state lies on the ranks in one of two ways, and each says so in its `state`:

- `Zero1`, ZeRO stage 1 by hand and over MPI alone: bfloat16 parameters that are the
  same on every rank; float32 masters and Adam moments in one flat partition a rank;
- `Fsdp2`, with ``--fsdp``: parameters and the state of AdamW are DTensors, each rank
  holding its rows of each; gradients go through torch.distributed.

Both have a random stream on every rank that draws its batches. `mpickpt.torch.adapt`
does the rest. For a given number of ranks the run is deterministic to the last bit,
whether or not it was broken and resumed: the digest printed at the end is the proof.
"""

import os

# Many ranks share few cores: one thread each, and who waits lets others run.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
os.environ.setdefault("MPIR_CVAR_POLLS_BEFORE_YIELD", "1")

import argparse
import hashlib
import math
import signal
import socket
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import mpickpt
import mpickpt.torch
from mpickpt import CheckpointManager, EverySteps, PerRank, Sharded

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 128, 64, 64, 4, 2
BATCH, LEARNING_RATE, WARM_UP_STEPS = 8, 4e-3, 8
BETAS, EPSILON = (0.9, 0.98), 1e-8

TEXT = torch.frombuffer(
    bytearray("".join(topics.values()).encode("ascii", "replace")), dtype=torch.uint8
).long()


def main() -> int:
    """Resume if there is something to resume, train, and print the final digest."""
    args = parse_args()
    comm = MPI.COMM_WORLD
    run = args.run or Path("runs", f"train_torch-{args.way}-{comm.size}-ranks")
    job = WAYS[args.way](comm, args.seed)
    try:
        with CheckpointManager(
            run,
            comm,
            state=lambda: mpickpt.torch.adapt(job.state()),
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
    parser = argparse.ArgumentParser(description="Train a small GPT of PyTorch.")
    option = parser.add_argument
    option("--fsdp", dest="way", action="store_const", const="fsdp2", default="zero1")
    option("--run", type=Path, help="run directory (default: one per world size)")
    option("--steps", type=int, default=40, help="train up to this step")
    option("--seed", type=int, default=20260131, help="another seed, another run")
    option("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    option("--keep", type=int, help="only the newest so many checkpoints")
    option("--wait", action="store_true", help="wait until a checkpoint is durable")
    option("--reshard", action="store_true", help="accept another number of ranks")
    option("--kill-rank", type=int, help="this rank SIGKILLs itself")
    option("--kill-step", type=int, help="in the middle of this step")
    return parser.parse_args()


def resume(
    job: "Training", checkpoints: CheckpointManager, args: argparse.Namespace
) -> None:
    """Fill `job` from the newest checkpoint that is whole, if there is one."""
    comm = job.comm
    restored = checkpoints.restore_latest(reshard=args.reshard)
    if restored is None:
        say(comm, f"starting from step 0 on {comm.size} ranks")
        return
    # Tensors were filled in place; plain values are new.
    job.step, job.losses = restored.state["step"], restored.state["losses"]
    say(comm, f"resumed from step {job.step} on {comm.size} ranks")
    say(comm, "loaded arrays {}".format(*digests(job)))


def train(
    job: "Training", checkpoints: CheckpointManager, args: argparse.Namespace
) -> None:
    """Train up to step `args.steps`, or until the job is told to stop."""
    comm = job.comm
    while job.step < args.steps and not checkpoints.should_stop:
        loss = job.backward()
        if (comm.rank, job.step + 1) == (args.kill_rank, args.kill_step):
            os.kill(os.getpid(), signal.SIGKILL)  # gone, as with its node: no goodbye
        job.update()
        job.step += 1
        job.losses.append(sum(comm.allgather(loss)) / comm.size)
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
    """What both ways have: the model, this rank's random stream, step and losses."""

    def __init__(self, comm: MPI.Intracomm, seed: int) -> None:
        self.comm = comm
        self.step = 0
        self.losses: list[float] = []
        torch.manual_seed(seed)
        self.model = Gpt()  # the same on every rank
        # The world size is part of the seed: when it changes, every rank keeps its new
        # stream, and none draws the batches of the first steps a second time.
        self.stream = torch.Generator().manual_seed(
            (seed << 32) + (comm.size << 16) + comm.rank
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it."""
        return {
            "model": self.model,
            "stream": PerRank(self.stream, on_resize="keep"),
            "step": self.step,
            "losses": self.losses,
        }

    def backward(self) -> float:
        """Make the gradients of a batch of this rank; return its loss."""
        starts = torch.randint(
            TEXT.numel() - CONTEXT, (BATCH, 1), generator=self.stream
        )
        text = TEXT[starts + torch.arange(CONTEXT + 1)]
        self.model.zero_grad()
        logits = self.model(text[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        return loss.item()

    def update(self) -> None:
        """Take one step of Adam with the mean of all ranks' gradients; collective."""
        raise NotImplementedError

    def arrays(self) -> Iterator[Tensor]:
        """Yield all arrays whole, the same on any number of ranks; collective."""
        raise NotImplementedError


class Zero1(Training):
    """ZeRO stage 1 by hand: each rank updates its partition of the flat parameters.

    Attributes
    ----------
    flat : Tensor of bfloat16, shape (N,)
        All parameters, of which the model's are views.
    counts : list of int
        How many of the N elements each rank owns.
    adam : dict of Tensor of float32, shape (counts[rank],)
        This rank's masters and Adam moments.
    """

    def __init__(self, comm: MPI.Intracomm, seed: int) -> None:
        super().__init__(comm, seed)
        weights = list(self.model.parameters())
        whole = torch.cat([weight.detach().flatten() for weight in weights])
        self.flat = whole.bfloat16()
        views = self.flat.split([weight.numel() for weight in weights])
        for weight, view in zip(weights, views, strict=True):
            weight.data = view.view_as(weight)
        share = math.ceil(whole.numel() / comm.size)
        bounds = [min(share * i, whole.numel()) for i in range(comm.size + 1)]
        self.counts = [stop - start for start, stop in pairwise(bounds)]
        master = whole[bounds[comm.rank] : bounds[comm.rank + 1]].clone()
        self.adam = {
            "master": master,
            "mean": torch.zeros_like(master),
            "square": torch.zeros_like(master),
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: consecutive blocks of each flat array."""
        return super().state() | {"adam": Sharded.block(self.adam)}

    def update(self) -> None:
        """Update this rank's partition; collect everyone's parameters; collective."""
        gradients = [
            weight.grad.float().flatten() for weight in self.model.parameters()
        ]
        # MPI may sum in any order; to receive all and sum here fixes the order.
        master, mean, square = self.adam.values()
        received = torch.empty(self.comm.size, master.numel())
        self.comm.Alltoallv(
            [torch.cat(gradients).numpy(), self.counts], received.numpy()
        )
        gradient = received.mean(dim=0)

        mean.lerp_(gradient, 1 - BETAS[0])
        square.lerp_(gradient.square(), 1 - BETAS[1])
        step = self.step + 1
        scaled = square.div(1 - BETAS[1] ** step).sqrt_().add_(EPSILON)
        rate = LEARNING_RATE * warm_up(self.step) / (1 - BETAS[0] ** step)
        master.addcdiv_(mean, scaled, value=-rate)

        # MPI knows no 16-bit float; to carry them, any 16-bit type will do.
        sent = master.bfloat16().view(torch.int16).numpy()
        self.comm.Allgatherv(sent, [self.flat.view(torch.int16).numpy(), self.counts])

    def arrays(self) -> Iterator[Tensor]:
        """Yield the parameters, and the flat arrays put together; collective."""
        yield self.flat
        for own in self.adam.values():
            whole = torch.empty(self.flat.numel())
            self.comm.Allgatherv(own.numpy(), [whole.numpy(), self.counts])
            yield whole


class Fsdp2(Training):
    """Fully sharded: each rank holds its rows of each parameter and of AdamW's state.

    Attributes
    ----------
    optimizer : AdamW
        Fills its state at the first step, which a load does before that.
    schedule : LambdaLR
        The warm-up.
    """

    def __init__(self, comm: MPI.Intracomm, seed: int) -> None:
        super().__init__(comm, seed)
        # Imported here, because that takes seconds and the other way needs none of it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        start_torch_distributed(comm)
        mesh = init_device_mesh("cpu", (comm.size,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return super().state() | {
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def update(self) -> None:
        """Take one step; FSDP has summed the gradients; collective."""
        self.optimizer.step()
        self.schedule.step()

    def arrays(self) -> Iterator[Tensor]:
        """Yield parameters and moments put together; collective."""
        for weight in self.model.parameters():
            yield weight.full_tensor().detach()
            state = self.optimizer.state.get(weight, {})  # empty before the first step
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    yield state[name].full_tensor()


WAYS: dict[str, type[Training]] = {"zero1": Zero1, "fsdp2": Fsdp2}


def start_torch_distributed(comm: MPI.Intracomm) -> None:
    """Let torch.distributed have the ranks of MPI."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    host = "localhost" if node.size == comm.size else socket.gethostname()
    node.Free()
    with socket.socket() as listener:
        listener.bind(("", 0))
        host, port = comm.bcast((host, listener.getsockname()[1]))
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=comm.rank,
        world_size=comm.size,
    )


def warm_up(step: int) -> float:
    """Return the factor of the learning rate."""
    return min(1.0, (step + 1) / WARM_UP_STEPS)


def digests(job: Training) -> tuple[str, str]:
    """Return SHA-256 of all arrays, and of these and the random streams.

    Collective. The first does not depend on how many ranks hold the arrays.
    """
    arrays = hashlib.sha256()
    for array in job.arrays():
        arrays.update(array.contiguous().view(torch.uint8).numpy())
    everything = arrays.copy()
    for stream in job.comm.allgather(bytes(job.stream.get_state().numpy())):
        everything.update(stream)
    return arrays.hexdigest(), everything.hexdigest()


class Gpt(nn.Module):
    """Characters in, logits of the next ones out; input and output weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.place.weight, std=0.05)
        nn.init.normal_(self.token.weight, std=0.05)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, shape (batch, context, VOCAB)."""
        x = self.token(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention to what came before, then a layer for each character alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x, (batch, context, WIDTH)."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.movedim(-3, 0).transpose(-2, -3)
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(-2, -3).flatten(-2))
        return x + self.down(self.up(self.second_norm(x)).relu())


if __name__ == "__main__":
    status = main()
    if dist.is_initialized():
        dist.destroy_process_group()
    # Exiting with a status aborts MPI under `-m mpi4py`, unless it is finalized; srun
    # answers an abort with a kill, and a requested requeue, 85, would look like 137.
    MPI.Finalize()
    sys.exit(status)
