"""Writes checkpoints in DeepSpeed's layout, of any size, in seconds and without it.

`test_deepspeed_memory.py` holds them against real ones.
"""

import math
import sys
import types
from collections import OrderedDict
from enum import IntEnum
from unittest import mock

import torch

VERSION = "0.19.8"
CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}


def stand_ins():
    """Return modules with classes that pickle under DeepSpeed's names."""
    modules = {}
    for name, class_name in CLASSES.items():
        module = types.ModuleType(name)
        made = (
            IntEnum(class_name, {"optimizer_states": 1, "weights": 3}, module=name)
            if class_name == "ZeroStageEnum"
            else type(class_name, (), {"__module__": name})
        )
        setattr(module, class_name, made)
        modules[name] = module
        for depth in range(1, name.count(".") + 1):
            parent = name.rsplit(".", depth)[0]
            modules.setdefault(parent, types.ModuleType(parent))
    return modules


def write_zero(folder, shapes, n_ranks, stage):
    """Write what AdamW with bf16 parameters leaves under ZeRO 1 or 3.

    Parameters
    ----------
    folder : Path
        Gets `latest` and a directory for one tag.
    shapes : dict of str to tuple of int
        The parameters.
    n_ranks : int
        Data-parallel ranks.
    stage : {1, 3}
        Stage of ZeRO.
    """
    tag = folder / "global_step2"
    tag.mkdir(parents=True)
    with mock.patch.dict(sys.modules, stand_ins()):
        for rank in range(n_ranks):
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            optimizer = (zero3 if stage == 3 else zero1)(shapes, n_ranks, rank)
            torch.save(with_version(optimizer_state_dict=optimizer), tag / name)
            model = model_state(shapes, n_ranks, stage)
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            if stage == 3 or rank == 0:
                torch.save(model, tag / f"{prefix}mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step2")


def with_version(**content):
    return {**content, "ds_config": {}, "ds_version": VERSION}


def model_state(shapes, n_ranks, stage):
    numel = sum(map(math.prod, shapes.values()))
    flat = torch.empty(0, dtype=torch.bfloat16)
    if stage == 1:
        flat = torch.randn(aligned(numel, n_ranks)).bfloat16()
    module, at = OrderedDict(), 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        part = flat[at : at + count].view(shape) if stage == 1 else torch.empty(0)
        module[name] = part.bfloat16()
        at += count
    return with_version(
        module=module,
        buffer_names=[],
        optimizer=None,
        param_shapes=[OrderedDict((n, torch.Size(s)) for n, s in shapes.items())],
        frozen_param_shapes=OrderedDict() if stage == 3 else None,
        shared_params={},
        frozen_param_fragments=OrderedDict() if stage == 3 else None,
        lr_scheduler=None,
        global_steps=2,
        dp_world_size=n_ranks,
        mp_world_size=1,
    )


def aligned(numel, n_ranks):
    return -(-numel // (2 * n_ranks)) * 2 * n_ranks


def base_state(partition):
    moments = {"exp_avg": torch.randn(partition), "exp_avg_sq": torch.rand(partition)}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}
    state = {0: {"step": torch.tensor(2.0), **moments}}
    return {"state": state, "param_groups": [group]}


def scaler():
    module = sys.modules["deepspeed.runtime.fp16.loss_scaler"]
    made = module.LossScaler()
    made.cur_scale, made.dynamic = 1.0, False
    return made


def zero1(shapes, n_ranks, rank):
    address = sys.modules["deepspeed.utils.tensor_fragment"].fragment_address
    numel = sum(map(math.prod, shapes.values()))
    partition = aligned(numel, n_ranks) // n_ranks
    first = rank * partition
    own = max(0, min(partition, numel - first))
    mappings, at = OrderedDict(), 0
    for name, shape in shapes.items():
        low = max(at, first)
        high = min(at + math.prod(shape), first + partition)
        if low < high:
            mappings[name] = address()
            mappings[name].start, mappings[name].numel = low - first, high - low
        at += math.prod(shape)
    return {
        "loss_scaler": scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 0.0,
        "base_optimizer_state": base_state(partition),
        "single_partition_of_fp32_groups": [torch.randn(partition)[:own]],
        "zero_stage": sys.modules["deepspeed.runtime.zero.config"].ZeroStageEnum(1),
        "group_paddings": [partition - own],
        "param_alignment_paddings": [[0] * len(shapes)],
        "partition_count": [n_ranks],
        "ds_version": VERSION,
        "param_slice_mappings": [mappings],
    }


def zero3(shapes, n_ranks, _rank):
    parts = sum(-(-math.prod(shape) // n_ranks) for shape in shapes.values())
    return {
        "zero_stage": sys.modules["deepspeed.runtime.zero.config"].ZeroStageEnum(3),
        "loss_scaler": scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": n_ranks,
        "optimizer_state_dict": base_state(parts),
        "fp32_flat_groups": [torch.randn(parts)],
    }
