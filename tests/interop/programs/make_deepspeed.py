"""Saves small checkpoints of DeepSpeed, and beside each what DeepSpeed loads of it.

    mpiexec -n 4 python make_deepspeed.py OUT [CASE ...]

Runs on CPUs, over gloo. Beside each checkpoint is `expected.npz`: what an engine holds
after it has trained on and then loaded the checkpoint.
"""

import argparse
import os
import sys
import traceback
from pathlib import Path

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
PORT = comm.bcast(os.environ.get("MASTER_PORT") or str(20000 + os.getpid() % 30000))
os.environ.update(
    RANK=str(comm.rank),
    WORLD_SIZE=str(comm.size),
    LOCAL_RANK=str(comm.rank),
    LOCAL_SIZE=str(comm.size),
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT=PORT,
    DS_ACCELERATOR="cpu",
    OMP_NUM_THREADS="1",
    GLOO_SOCKET_IFNAME="lo",
)

import deepspeed  # noqa: E402
import deepspeed.comm.torch  # noqa: E402
import torch  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.utils import (  # noqa: E402
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)

from tests.interop.deepspeed_models import Block, Model, groups_of  # noqa: E402

torch.set_num_threads(1)
BY_LAYER = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*up\.weight$"], "partition_type": "column"},
            {"patterns": [r".*down\.weight$"], "partition_type": "row"},
        ],
    },
}
STATES = ("exp_avg", "exp_avg_sq")
UNIVERSAL = ("zero1-bf16", "zero2-fp16", "zero3-bf16", "subgroups")
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def cases():
    """Return the configuration of each case by name."""
    found = {}
    for stage in range(4):
        for dtype in TYPES:
            found[f"zero{stage}-{dtype}"] = configuration(stage, dtype)
    found["round-robin"] = configuration(2, "bf16", round_robin_gradients=True)
    found["subgroups"] = configuration(3, "bf16", sub_group_size=600)
    found["persistent"] = configuration(
        3, "fp16", stage3_param_persistence_threshold=100
    )
    found["bf16-optimizer"] = configuration(1, "bf16")
    found["bf16-optimizer"]["data_types"] = {"grad_accum_dtype": "fp32"}
    found["bf16-optimizer"]["bf16"]["immediate_grad_update"] = True
    if comm.size == 4:
        for stage in (1, 3):
            found[f"tensor-parallel-zero{stage}"] = configuration(stage, "bf16")
            found[f"tensor-parallel-zero{stage}"]["tensor_parallel"] = BY_LAYER
    return found


def configuration(stage, dtype, **zero):
    zero.setdefault("stage3_param_persistence_threshold", 0)
    found = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if dtype == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return found


def convert(folder):
    """Make a universal checkpoint of one that was saved."""
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(folder / "global_step2"),
            output_folder=str(folder / "global_step2_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def expect_universal(folder):
    """Take what DeepSpeed's own tool has joined of tensor-parallel ranks."""
    if comm.rank == 0:
        convert(folder)
        zero = folder / "global_step2_universal" / "zero"
        expected = {}
        for file in zero.glob("*/*.pt"):
            part = {"fp32": "master"}.get(file.stem, file.stem)
            content = torch.load(file, weights_only=False)
            tensor = content["param"] if isinstance(content, dict) else content
            if part in ("master", *STATES) and file.parent.name != "seen":
                expected[f"{part}/{file.parent.name}"] = raw(tensor)
        np.savez(folder / "expected.npz", **expected)
    comm.Barrier()


def train(engine, steps, seed, part):
    for step in range(steps):
        draw = torch.Generator().manual_seed(100 * seed + 10 * step + part)
        loss = engine(torch.randint(0, 97, (2, 8), generator=draw))
        engine.backward(loss)
        engine.step()


def save(folder, config):
    torch.manual_seed(0)
    is_parallel = "tensor_parallel" in config
    model = Block() if is_parallel else Model(config["zero_optimization"]["stage"] > 0)
    # Without ZeRO the files have no names, and several groups leave none to be found.
    parameters = groups_of(model) if model.is_grouped else model.parameters()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=config
    )
    train(engine, 2, seed=1, part=comm.rank // 2 if is_parallel else comm.rank)
    engine.save_checkpoint(str(folder), tag="global_step2", client_state=client_state())
    if is_parallel:
        expect_universal(folder)
        engine.destroy()
        return
    if folder.name != "bf16-optimizer":  # whose moments it does not find after a load
        train(engine, 1, seed=2, part=comm.rank)
        engine.load_checkpoint(str(folder), tag="global_step2")
        link_states(engine.optimizer)
    expected = held(engine)
    if comm.rank == 0:
        np.savez(folder / "expected.npz", **expected)
        if folder.name in UNIVERSAL:
            convert(folder)
    engine.destroy()
    comm.Barrier()


def link_states(optimizer):
    """Have the moments that were loaded be found, which the next step would do."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def client_state():
    return {
        "epoch": 1,
        "note": "sample",
        "nothing": None,
        "arguments": argparse.Namespace(layers=3, name="tiny"),
        "random": np.arange(5, dtype=np.uint32),
        "generator": torch.arange(4, dtype=torch.uint8),
        "wanted": {"limits": (1, 2.5), "tags": {"b", "a"}},
    }


def held(engine):
    """Return what an engine holds, as bytes: parameters, masters, moments."""
    found = {}
    is_split = engine.zero_optimization_stage() == 3
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=is_split):
            found[f"model/{name}"] = raw(parameter)
        if not parameter.requires_grad or not engine.zero_optimization():
            continue
        found[f"master/{name}"] = raw(safe_get_full_fp32_param(parameter))
        states = engine.optimizer.optimizer.state.values()
        found[f"step/{name}"] = raw(next(iter(states))["step"])
        for state in STATES:
            full = safe_get_full_optimizer_state(parameter, state)
            found[f"{state}/{name}"] = raw(full)
    if not engine.zero_optimization():
        found |= held_whole(engine)
    if getattr(engine.optimizer, "round_robin_gradients", False):
        found |= held_reordered(engine)
    return found


def held_reordered(engine):
    """Return masters and moments from where the ranks have them.

    `safe_get_full_fp32_param` looks in the order from before the reordering.
    """
    found = {}
    optimizer = engine.optimizer
    names = {id(p): n for n, p in engine.module.named_parameters()}
    for number, group in enumerate(optimizer.round_robin_bit16_groups):
        flat = optimizer.single_partition_of_fp32_groups[number]
        states = optimizer.optimizer.state[flat]
        for part, own in (("master", flat), *((s, states[s]) for s in STATES)):
            whole = np.concatenate(comm.allgather(own.detach().numpy()))
            for parameter in group:
                values, whole = np.split(whole, [parameter.numel()])
                shaped = torch.from_numpy(values.copy()).view(parameter.shape)
                found[f"{part}/{names[id(parameter)]}"] = raw(shaped)
    return found


def held_whole(engine):
    """Return masters and moments of an optimizer that is not split."""
    found = {}
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    names = {id(p): n for n, p in engine.module.named_parameters()}
    half = getattr(optimizer, "fp16_groups", None)
    for number, group in enumerate(inner.param_groups):
        for index, parameter in enumerate(group["params"]):
            own = parameter if half is None else half[number][index]
            name = names[id(own)]
            if half is not None:
                found[f"master/{name}"] = raw(parameter)
            for state in inner.state[parameter].keys() & {*STATES, "step"}:
                found[f"{state}/{name}"] = raw(inner.state[parameter][state])
    return found


def raw(tensor):
    tensor = tensor.detach().cpu().contiguous()
    itemsize = tensor.element_size()
    shaped = tensor.reshape(-1).view(torch.uint8).numpy().view(f"V{itemsize}")
    return shaped.reshape(tensor.shape)


def main():
    out, *wanted = sys.argv[1:]
    accelerator = type(get_accelerator())
    # DeepSpeed refuses fp16 on most CPUs; the format is the same.
    accelerator.is_fp16_supported = lambda _: True
    accelerator.supported_dtypes = lambda _: list(TYPES.values())
    # It would be compiled first, for half a minute, and gloo does without.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    for name, config in cases().items():
        if not wanted or name in wanted:
            folder = Path(out) / name
            folder.mkdir(parents=True, exist_ok=True)
            comm.Barrier()
            save(folder, config)
    if comm.rank == 0:
        print("MADE", flush=True)


try:
    main()
except BaseException:
    traceback.print_exc()
    comm.Abort(1)
