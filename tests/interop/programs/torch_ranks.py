"""mpiexec -n P python torch_ranks.py COMMAND:WAY:FOLDER ...: torch's parallelisms.

`save` trains a model two steps, saves it, notes what all its tensors are, and trains
on. `load` makes another model, loads, and compares; on the same number of ranks it
trains on as well. The way is how the model is spread over the ranks. Rank 0 prints a
line for each command, when all ranks have found everything as it should be.
"""

import hashlib
import json
import sys
import warnings
from pathlib import Path

from tests.interop.programs.torch_world import comm, start_torch, stop_torch

start_torch()

import torch  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import mpickpt  # noqa: E402
import mpickpt.torch  # noqa: E402

warnings.filterwarnings("ignore", module="torch")

WORDS, WIDTH = 37, 12
SEED_OF_BATCHES = 5


class Block(torch.nn.Module):
    """Two layers of sizes that no number of ranks divides, but those of TP."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 20)
        self.down = torch.nn.Linear(20, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    """A tied embedding, two blocks, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.odd = torch.nn.Parameter(torch.randn(3, 5))
        self.register_buffer("scale", torch.rand(7))

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x).logsumexp(-1).mean() + self.odd.pow(2).sum()


def fsdp2(model):
    mesh = init_device_mesh("cpu", (comm.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def hsdp(model):
    mesh = init_device_mesh("cpu", (2, comm.size // 2), mesh_dim_names=("r", "s"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tp_fsdp2(model):
    mesh = init_device_mesh("cpu", (comm.size // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def bfloat16(model):
    return fsdp2(model.to(torch.bfloat16))


def plain(model):
    return model


WAYS = {
    "fsdp2": fsdp2,
    "bfloat16": bfloat16,
    "hsdp": hsdp,
    "tp-fsdp2": tp_fsdp2,
    "ddp": DistributedDataParallel,
    "plain": plain,
}


class Training:
    """A model with its optimizer and schedule."""

    def __init__(self, way, seed):
        torch.manual_seed(seed)
        self.model = WAYS[way](Model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.steps = 0

    def train(self, steps):
        for _ in range(steps):
            seed = SEED_OF_BATCHES + self.steps
            words = torch.randint(
                0, WORDS, (2, 9), generator=torch.Generator().manual_seed(seed)
            )
            self.model(words).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.steps += 1

    def state(self):
        return mpickpt.torch.adapt(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "schedule": self.schedule,
                "rng": mpickpt.torch.RandomState(on_resize="keep"),
            }
        )

    def digests(self):
        """Return the digest of each tensor, whole, by name; collective."""
        model = getattr(self.model, "module", self.model)
        digests = {name: digest(value) for name, value in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                digests[f"{name} {key}"] = digest(value)
        digests["lr"] = repr(self.optimizer.param_groups[0]["lr"])
        digests["last_epoch"] = repr(self.schedule.last_epoch)
        return digests


def digest(tensor):
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    content = whole.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


def save(way, folder):
    training = Training(way, 1)
    training.train(2)
    with torch.no_grad():  # after which FSDP may keep whole parameters
        training.model(torch.arange(3))
    mpickpt.save_sharded(training.state(), folder / way, step=2, comm=comm)
    told = {"saved": training.digests(), "size": comm.size}
    training.train(2)
    told["trained"] = training.digests()
    if comm.rank == 0:
        (folder / f"{way}.json").write_text(json.dumps(told))
    comm.Barrier()


def load(way, folder):
    """Load what one way has saved into another: `saved>here`."""
    saved, here = way.split(">")
    told = json.loads((folder / f"{saved}.json").read_text())
    training = Training(here, 2 + comm.rank)
    mpickpt.load_sharded(
        folder / saved,
        comm=comm,
        like=training.state(),
        reshard=told["size"] != comm.size or saved != here,
    )
    training.steps = 2
    require_same(training.digests(), told["saved"])
    if told["size"] == comm.size and saved == here:
        training.train(2)
        require_same(training.digests(), told["trained"])


def again(way, folder):
    """Load into a training that has gone on; an asynchronous save before it."""
    training = Training(way, 1)
    training.train(1)
    state = training.state()
    pending = mpickpt.save_sharded_async(state, folder / "again", step=1, comm=comm)
    saved = training.digests()
    training.train(2)
    pending.result()
    mpickpt.load_sharded(folder / "again", comm=comm, like=state)
    require_same(training.digests(), saved)


def leaves(way, folder):
    """Save and load DTensors that stand in a tree by themselves."""
    rows = 2 if comm.size > 1 else 1
    mesh = init_device_mesh("cpu", (rows, comm.size // rows))
    values = {
        "row": (torch.arange(101 * 7.0).reshape(101, 7), [Shard(0), Replicate()]),
        "column": (torch.arange(32 * 48.0).reshape(32, 48), [Replicate(), Shard(1)]),
        "both": (torch.rand(33, 17).bfloat16(), [Shard(0), Shard(1)]),
        "twice": (torch.arange(11), [Shard(0), Shard(0)]),
        "whole": (torch.ones(5), [Replicate(), Replicate()]),
        "number": (torch.tensor(3.5), [Replicate(), Replicate()]),
        "few": (torch.arange(1.0), [Shard(0), Shard(0)]),
        "empty": (torch.empty(0, 4), [Shard(0), Shard(1)]),
    }
    torch.manual_seed(0)
    state = {k: distribute_tensor(v, mesh, p) for k, (v, p) in values.items()}
    mpickpt.save_sharded(
        mpickpt.torch.adapt(state), folder / "leaves", step=0, comm=comm
    )
    turned = {
        k: distribute_tensor(torch.zeros_like(v), mesh, p[::-1])
        for k, (v, p) in values.items()
    }
    mpickpt.load_sharded(
        folder / "leaves", comm=comm, like=mpickpt.torch.adapt(turned), reshard=True
    )
    for key, tensor in turned.items():
        assert torch.equal(tensor.full_tensor(), state[key].full_tensor()), key
    if comm.rank == 0:
        with mpickpt.open_checkpoint(folder / "leaves") as checkpoint:
            assert (checkpoint["row"][:] == values["row"][0].numpy()).all()


def refuse(way, folder):
    """Have states refused that cannot be saved, by the same error on all ranks."""
    mesh = init_device_mesh("cpu", (comm.size,))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    require_refused({"deep": [partial]}, folder, "deep/0", "parts of a sum")
    module = torch.nn.Linear(2, 2, device="meta" if comm.rank == 1 else "cpu")
    require_refused({"m": module}, folder, "m/weight", "meta device")
    require_refused({"x": torch.ones(2)}, folder, "x", "bare array")


def require_refused(state, folder, key, words):
    try:
        adapted = mpickpt.torch.adapt(state)
        mpickpt.save_sharded(adapted, folder / "refused", step=0, comm=comm)
    except mpickpt.StateTypeError as error:
        assert error.key == key and words in str(error), error
        return
    raise AssertionError(f"{key} was saved")


def own(way, folder):
    """Let ranks differ where the caller says that they may."""
    torch.manual_seed(comm.rank)
    model = torch.nn.BatchNorm1d(3)
    model.running_mean.fill_(comm.rank)
    state = {"m": model}
    try:
        mpickpt.save_sharded(
            mpickpt.torch.adapt(state), folder / "same", step=0, comm=comm
        )
    except mpickpt.ReplicaMismatchError as error:
        assert error.key == "m/running_mean", error
    else:
        raise AssertionError("buffers that differ were saved as equal")
    adapted = mpickpt.torch.adapt(state, buffers="per_rank")
    mpickpt.save_sharded(adapted, folder / "own", step=0, comm=comm)
    model.running_mean.fill_(-1)
    mpickpt.load_sharded(folder / "own", comm=comm, like=adapted)
    assert (model.running_mean == comm.rank).all()
    # Alone, each rank is another number of ranks: it takes rank 0's.
    mpickpt.load_sharded(folder / "own", like=adapted, reshard=True)
    assert (model.running_mean == 0).all()


def require_same(got, wanted):
    assert sorted(got) == sorted(wanted)
    differing = [key for key in wanted if got[key] != wanted[key]]
    assert not differing, differing


COMMANDS = {
    "save": save,
    "load": load,
    "again": again,
    "leaves": leaves,
    "refuse": refuse,
    "own": own,
}

for command in sys.argv[1:]:
    do, way, folder = command.split(":", 2)
    COMMANDS[do](way, Path(folder))
    comm.Barrier()
    if comm.rank == 0:
        print("done", do, way, flush=True)
stop_torch()
