"""Saves and loads through DCP on several ranks: dcp_storage.py FOLDER CASE...

Each case is a function; rank 0 prints its name when it has passed on all ranks.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mpickpt
from mpickpt.torch import DcpReader, DcpWriter

comm = MPI.COMM_WORLD
WORDS = 97
CHECKPOINT = "run/step-0000000002"


def model_of(seed, mesh=None):
    """Return a small model, sharded over all ranks, with layers that do not divide."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Embedding(WORDS, 16),
        torch.nn.Linear(16, 33),
        torch.nn.LayerNorm(33),
        torch.nn.Linear(33, WORDS, bias=False),
        torch.nn.Linear(1, 3),
    )
    mesh = mesh or init_device_mesh("cpu", (comm.size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def trained(seed, mesh=None, steps=2):
    """Return a model and its optimizer after some steps of equal data on all ranks."""
    model = model_of(seed, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(seed)
    for _ in range(steps):
        hidden = model[2](model[1](model[0](torch.randint(0, WORDS, (2, 8)))))
        loss = model[3](hidden).logsumexp(-1).mean() + model[4](torch.ones(1, 1)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model, optimizer, step=2):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state, "step": step, "lr": 1e-3}


def whole(state):
    """Return the state with whole tensors, which are copies."""
    if isinstance(state, DTensor):
        return state.full_tensor().clone()
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole(value) for value in state)
    return state


def bits(tensor):
    return tensor.detach().flatten().contiguous().view(torch.uint8)


def assert_equal(found, expected, where=""):
    assert type(found) is type(expected), (where, found, expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(bits(found), bits(expected)), where
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, where
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert set(found) == set(expected), (where, set(found) ^ set(expected))
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{where}/{number}")
    else:
        assert found == expected, (where, found, expected)


def emptied(state):
    """Return a state of the same tensors, all zero, and of values that are None."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [emptied(value) for value in state]
    return None


def load(path, state, **how):
    dcp.load(state, storage_reader=DcpReader(path, comm, **how))
    return state


def failure_of(call):
    """Return the text of DCP's error, which every rank must get."""
    try:
        call()
    except CheckpointException as error:
        texts = comm.allgather(sorted(str(e[0]) for e in error.failures.values()))
        assert all(text == texts[0] for text in texts), texts
        kinds = {type(e[0]) for e in error.failures.values()}
        return kinds, texts[0][0]
    raise AssertionError("no error was raised")


def values(folder):
    """Every kind of value and tensor comes back as DCP's own storage gives it."""
    mesh = init_device_mesh("cpu", (comm.size,))
    state = {
        "rows": distribute_tensor(
            torch.arange(101 * 7.0).view(101, 7), mesh, [Shard(0)]
        ),
        "one row": distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)]),
        "half": distribute_tensor(torch.arange(99.0).bfloat16(), mesh, [Shard(0)]),
        "everywhere": distribute_tensor(torch.ones(5), mesh, [Replicate()]),
        "plain tensor": torch.arange(12.0).view(3, 4).T,
        "eighth": torch.arange(8.0).to(torch.float8_e4m3fn),
        "truth": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "nothing": torch.zeros(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "list": [{"a": 1, "b": torch.ones(2)}, torch.zeros(1), "text"],
        "values": [1, 2.5, None, [b"bytes", float("inf")], 1 << 80],
        "pair": (0.9, np.arange(3, dtype=np.uint32)),
        "array": np.eye(2),
        "tensors in a tuple": (torch.ones(3), torch.float32, torch.Size([2])),
        "long": list(range(100_000)),
        "0": {"1": {"x/y": "slashes", "%": 1, "": True}},
        "optim": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"lr": 0.1}]},
    }
    dcp.save(state, storage_writer=DcpWriter(folder / "ours", comm, step=7))
    dcp.save(state, checkpoint_id=folder / "theirs")

    found = load(folder / "ours", emptied(state))

    expected = emptied(state)
    dcp.load(expected, storage_reader=FileSystemReader(folder / "theirs"))
    assert_equal(whole(found), whole(expected))
    tree = mpickpt.load_sharded(folder / "ours", comm=comm)
    assert tree["optim"]["groups"] == [{"lr": 0.1}]
    assert mpickpt.read_manifest(folder / "ours").step == 7


def fsdp_save(folder):
    """A trained FSDP2 model is saved, and loaded on the same ranks."""
    model, optimizer = trained(seed=1)
    state = state_of(model, optimizer)
    dcp.save(state, storage_writer=DcpWriter(folder / CHECKPOINT, comm))
    expected = whole(state)
    if comm.rank == 0:
        torch.save(expected, folder / "fsdp.expected")

    fsdp_load(folder)


def fsdp_load(folder):
    """The model is loaded into another one, on any number of ranks."""
    expected = torch.load(folder / "fsdp.expected") if comm.rank == 0 else None
    model, optimizer = trained(seed=2, steps=1)
    state = load(folder / CHECKPOINT, state_of(model, optimizer, step=0))
    if comm.rank == 0:
        assert_equal(whole(state), expected)
    else:
        whole(state)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )


def fsdp_save_again(folder):
    """What was loaded on this number of ranks is saved by it."""
    model, optimizer = trained(seed=3, steps=1)
    state = load(folder / CHECKPOINT, state_of(model, optimizer, step=0))
    writer = DcpWriter(folder / CHECKPOINT, comm, step=2, overwrite=True)

    dcp.save(state, storage_writer=writer)

    assert writer.result.step == 2
    assert mpickpt.read_manifest(folder / CHECKPOINT).world_size == comm.size


def part_of_the_state(folder):
    """Only the model is loaded, and only the blocks that hold it are read."""
    expected = torch.load(folder / "fsdp.expected")["model"]
    model = model_of(seed=5)
    state = {"model": model.state_dict()}

    load(folder / CHECKPOINT, state)

    assert_equal(whole(dict(state["model"])), dict(expected))


def meshes(folder):
    """Two-dimensional meshes: replicas are stored once, boxes go anywhere."""
    mesh = init_device_mesh("cpu", (2, comm.size // 2), mesh_dim_names=("dp", "tp"))
    table = torch.arange(33 * 17.0).view(33, 17)
    ways = {
        "both": [Shard(0), Shard(1)],
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "twice": [Shard(0), Shard(0)],
    }
    state = {name: distribute_tensor(table, mesh, way) for name, way in ways.items()}
    hybrid, optimizer = trained(seed=4, mesh=mesh)
    state |= {"hybrid": get_state_dict(hybrid, optimizer)[0]}
    dcp.save(state, storage_writer=DcpWriter(folder / "meshes", comm))
    again = [[Shard(1), Shard(0)], [Replicate(), Replicate()], [Shard(1), Shard(1)]]
    names = ("both", "columns", "rows", "twice")

    for way in again:
        found = {
            n: distribute_tensor(torch.zeros_like(table), mesh, way) for n in names
        }
        load(folder / "meshes", found)
        for name in names:
            assert_equal(found[name].full_tensor(), table)
    dense = {"both": torch.zeros(33, 17), "rows": torch.zeros(33, 17).double()}
    load(folder / "meshes", dense)
    assert torch.equal(dense["both"], table)
    assert torch.equal(dense["rows"], table.double())
    restored = emptied(state["hybrid"])
    load(folder / "meshes", {"hybrid": restored})
    assert_equal(whole(restored), whole(dict(state["hybrid"])))
    nbytes = sum(
        shard.nbytes for shard in mpickpt.read_manifest(folder / "meshes").shards
    )
    assert nbytes < 200_000


def in_the_background(folder):
    """async_save saves what was there when it was called."""
    model, optimizer = trained(seed=6)
    state = state_of(model, optimizer)
    expected = whole(state)
    saved = dcp.async_save(
        state, storage_writer=DcpWriter(folder / "async", comm, step=3)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    comm.allreduce(1)  # the program's own messages go on meanwhile
    saved.result()

    found = load(folder / "async", emptied(state))

    assert_equal(whole(found), whole(expected))
    second = dcp.async_save(state, storage_writer=DcpWriter(folder / "async", comm))
    kinds, text = failure_of(second.result)
    assert kinds == {mpickpt.CheckpointExistsError}, text


class Halving(DefaultSavePlanner):
    """Saves tensors as float16, as DCP's documentation shows it."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def transform_object(self, write_item, object):
        found = super().transform_object(write_item, object)
        return found.half() if isinstance(found, torch.Tensor) else found


class Balancing(DefaultSavePlanner):
    """Gives the items of rank 0 to all ranks in turn."""

    def create_global_plan(self, all_plans):
        plans = [
            dataclasses.replace(plan, items=all_plans[0].items[number :: comm.size])
            for number, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(plans)


def planners(folder):
    """Planners that convert, share out and remember get what they ask for."""
    state = {"w": torch.arange(40.0).view(8, 5), "b": {"x": torch.ones(3), "n": 3}}
    for planner in (
        Halving(),
        Balancing(),
        DefaultSavePlanner(dedup_save_to_lowest_rank=True),
        DefaultSavePlanner(flatten_state_dict=False),
    ):
        path = folder / f"{type(planner).__name__}-{planner.flatten_state_dict}"
        dcp.save(state, storage_writer=DcpWriter(path, comm), planner=planner)
        found = emptied(state)
        flatten = planner.flatten_state_dict
        loader = dcp.DefaultLoadPlanner(
            flatten_state_dict=flatten, flatten_sharded_tensors=flatten
        )
        dcp.load(found, storage_reader=DcpReader(path, comm), planner=loader)
        assert_equal(found, state)
    dtypes = {
        array.dtype for array in mpickpt.read_manifest(folder / "Halving-True").arrays
    }
    assert dtypes == {"float16"}
    remembering = folder / "remembering"
    for step in range(3):
        state["w"] += 1
        state["b"]["n"] = step
        planner = DefaultSavePlanner(enable_plan_caching=True)
        writer = DcpWriter(remembering, comm, step=step, overwrite=True)
        dcp.save(state, storage_writer=writer, planner=planner)
        assert_equal(load(remembering, emptied(state)), state)


def errors(folder):
    """What one rank cannot do fails on all, in DCP's error, and leaves nothing."""

    class Opaque:
        pass

    path = folder / "errors"
    state = {"w": torch.ones(3), f"own {comm.rank}": torch.ones(2)}
    writer = DcpWriter(path, comm)
    lowest = {f"of {comm.rank}": Opaque()} if comm.rank else {}
    kinds, text = failure_of(lambda: dcp.save(state | lowest, storage_writer=writer))
    assert kinds == {mpickpt.StateTypeError} and "of 1" in text, text
    assert "Opaque" in text and not (path / "manifest.json").exists()

    dcp.save(state, storage_writer=writer)
    kinds, text = failure_of(lambda: dcp.save(state, storage_writer=writer))
    assert kinds == {mpickpt.CheckpointExistsError}, text

    alone = DcpWriter(folder / "alone", MPI.COMM_SELF)
    kinds, text = failure_of(lambda: dcp.save(state, storage_writer=alone))
    assert kinds == {mpickpt.CallMismatchError} and "ranks" in text, text

    kinds, text = failure_of(lambda: load(folder / "nowhere", state))
    assert "nowhere" in text, text

    missing = {"w": torch.ones(3), "more": torch.ones(1)}
    kinds, text = failure_of(lambda: load(path, missing))
    assert "more" in text, text


class LateToFail(DefaultSavePlanner):
    def finish_plan(self, new_plan):
        if comm.rank == 1:
            raise OSError("the planner of rank 1")
        return super().finish_plan(new_plan)


class UnableToTake(dcp.DefaultLoadPlanner):
    def resolve_tensor(self, read_item):
        if comm.rank == 1:
            raise OSError("the memory of rank 1")
        return super().resolve_tensor(read_item)


def failing_planners(folder):
    """A planner that fails on one rank keeps the others waiting no longer than said."""
    path, state = folder / "planner", {"w": torch.ones(3)}
    dcp.save(state, storage_writer=DcpWriter(path, comm))
    reader = DcpReader(path, comm)
    kinds, text = failure_of(
        lambda: dcp.load(state, storage_reader=reader, planner=UnableToTake())
    )
    assert "the memory of rank 1" in text, text

    options = mpickpt.SaveOptions(timeout_s=2)
    writer = DcpWriter(path, comm.Dup(), options=options, overwrite=True)
    kinds, text = failure_of(
        lambda: dcp.save(state, storage_writer=writer, planner=LateToFail())
    )
    assert kinds == {mpickpt.CollectiveTimeoutError, OSError}, (kinds, text)
    load(path, state)


def damage(folder):
    """A flipped bit is an error on all ranks, never a tensor."""
    path = folder / "damage"
    state = {"w": torch.arange(5000.0), "v": torch.ones(300_000)}
    dcp.save(state, storage_writer=DcpWriter(path, comm))
    if comm.rank == 0:
        shard = max(path.glob("rank*.h5"), key=lambda file: file.stat().st_size)
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    comm.barrier()

    for wanted in (state, {"v": state["v"]}):
        kinds, text = failure_of(lambda wanted=wanted: load(path, emptied(wanted)))
        assert kinds == {mpickpt.CorruptShardError}, (kinds, text)


def without_threads(folder):
    """Without MPI_THREAD_MULTIPLE, async_save says so, and save goes on."""
    state = {"w": torch.ones(3)}
    assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
    writer = DcpWriter(folder / "funneled", comm)

    saved = dcp.async_save(state, storage_writer=writer)

    kinds, text = failure_of(saved.result)
    assert kinds == {mpickpt.CallMismatchError} and "MPI_THREAD_MULTIPLE" in text
    dcp.save(state, storage_writer=writer)


def main():
    folder = Path(sys.argv[1])
    meeting = Path(comm.bcast(tempfile.mktemp(dir=folder) if comm.rank == 0 else None))
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=comm.rank, world_size=comm.size
    )
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        globals()[name](folder)
        comm.barrier()
        if comm.rank == 0:
            print(f"{name} passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
