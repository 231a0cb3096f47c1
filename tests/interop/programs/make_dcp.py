"""Ranks of mpiexec save checkpoints of DCP: make_dcp.py FOLDER CASE..."""

import sys
import warnings
from pathlib import Path

from tests.interop.programs.torch_world import comm, start_torch, stop_torch

warnings.simplefilter("ignore")
start_torch()

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    Replicate,
    Shard,
    distribute_tensor,
)


def network():
    """Return a network with shapes that no number of ranks divides."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(197, 24),
        torch.nn.Linear(24, 32),
        torch.nn.LayerNorm(32),
        torch.nn.Linear(32, 197, bias=False),
        torch.nn.Linear(13, 7),
    )


def trained(model, layers):
    """Return a training state after two steps of Adam."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        words = torch.randint(0, 197, (2, 8))
        hidden = layers[2](layers[1](layers[0](words)))
        loss = layers[3](hidden).logsumexp(-1).mean()
        (loss + layers[4](torch.ones(1, 13)).sum() * 1e-3).backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters, state = get_state_dict(model, optimizer)
    return {"model": parameters, "optim": state, "step": 2, "lr": 1e-3}


def fsdp2():
    model = network()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (comm.size,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (comm.size,)))
    return trained(model, model)


def hsdp():
    mesh = init_device_mesh("cpu", (2, comm.size // 2), mesh_dim_names=("dp", "fsdp"))
    model = network()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model, model)


def fsdp1():
    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, words):
            layers = self.layers
            hidden = layers[3](layers[2](layers[1](layers[0](words))))
            return hidden.logsumexp(-1).mean() + layers[4](torch.ones(1, 13)).sum()

    model = FullyShardedDataParallel(
        Whole(), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randint(0, 197, (2, 8))).backward()
    optimizer.step()
    parameters, state = get_state_dict(model, optimizer)
    return {"model": parameters, "optim": state, "step": 1}


def dtensor():
    mesh = init_device_mesh("cpu", (comm.size // 2, 2), mesh_dim_names=("dp", "tp"))

    def placed(values, *placements):
        return distribute_tensor(values, mesh, placements)

    rows = torch.arange(101 * 7.0).reshape(101, 7)
    columns = torch.arange(32 * 48.0).reshape(32, 48)
    both = torch.arange(33 * 17.0).reshape(33, 17).bfloat16()
    return {
        "row": placed(rows, Shard(0), Replicate()),
        "col": placed(columns, Replicate(), Shard(1)),
        "turned": placed(columns.t(), Shard(0), Shard(1)),
        "both": placed(both, Shard(0), Shard(1)),
        "short": placed(torch.arange(1.0), Shard(0), Replicate()),
        "rep": placed(torch.ones(5), Replicate(), Replicate()),
        "step": 7,
        "obj": {"a": [1, 2], "b": [torch.arange(3), {"c": (1, None)}]},
    }


def alone():
    return {f"of rank {comm.rank}": torch.ones(3), "all": torch.zeros(4)}


CASES = {
    "fsdp2": (fsdp2, dcp.save),
    "fsdp2-async": (fsdp2, lambda *a, **k: dcp.async_save(*a, **k).result()),
    "hsdp": (hsdp, dcp.save),
    "fsdp1": (fsdp1, dcp.save),
    "dtensor": (dtensor, dcp.save),
    "alone": (alone, lambda *a, **k: dcp.save(*a, use_collectives=False, **k)),
}

folder = Path(sys.argv[1])
for case in sys.argv[2:]:
    make, save = CASES[case]
    save(make(), checkpoint_id=str(folder / case))
    comm.Barrier()
    if comm.rank == 0:
        print(f"{case} made", flush=True)
stop_torch()
