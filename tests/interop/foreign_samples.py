"""Small checkpoints in the layouts of other systems, made by torch in this process.

Real ones, made by these systems themselves, are imported in the tests of each importer;
these take milliseconds, so that there can be thousands of damaged copies.
"""

import hashlib
import io
import json
import sys
import types
import warnings
from collections import OrderedDict
from enum import IntEnum
from unittest import mock

import torch


def make_dcp(path, **more):
    """Save a small state of one process; `more` is added to it."""
    import torch.distributed.checkpoint as dcp

    state = {
        "model": {
            "w": torch.arange(60.0).reshape(12, 5),
            "b": torch.ones(7, dtype=torch.bfloat16),
        },
        "optim": {
            "state": {"w": {"exp_avg": torch.rand(12, 5), "step": torch.tensor(2.0)}},
            "param_groups": [{"params": ["w"], "lr": 1e-3}],
        },
        "step": 2,
        "notes": {"a": [1, 2.5, "three"]},
        **more,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)


def make_nemo(path, state=None):
    """Imitate what Megatron-core saves: DCP with items that it has pickled itself."""
    import torch.distributed.checkpoint as dcp

    class Planner(dcp.DefaultSavePlanner):
        def transform_object(self, write_item, value):
            if isinstance(value, io.BytesIO):
                return value
            return super().transform_object(write_item, value)

    def pickled(value):
        file = io.BytesIO()
        torch.save(value, file)
        return file

    state = state or {
        "model.w": torch.arange(60.0).reshape(12, 5).bfloat16(),
        "optimizer.state.exp_avg.model.w": torch.rand(12, 5),
        "common_state/shard_0_1": pickled([{"iteration": 100, "args": {"hidden": 5}}]),
        "extra/shard_0_2": pickled([{"tp": 0}]),
        "extra/shard_1_2": pickled([{"tp": 1}]),
    }
    iteration = path / "iter_0000100"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=iteration, planner=Planner())
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (iteration / "metadata.json").write_text(json.dumps(config))
    (path / "latest_checkpointed_iteration.txt").write_text("100")


def make_nemo_with_common_file(path):
    """Imitate an older Megatron-core, which has a file for what is no tensor."""
    make_nemo(path, {"model.w": torch.rand(12, 5)})
    torch.save({"iteration": 100}, path / "iter_0000100" / "common.pt")


def make_nemo_with_digests(path):
    make_nemo(path)
    iteration = path / "iter_0000100"
    digests = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in iteration.iterdir()
        if file.name != "metadata.json"
    }
    document = {"algorithm": "sha256", "files": digests}
    (iteration / "integrity.json").write_text(json.dumps(document))


def make_zero1(path):
    """Imitate ZeRO stage 1 of two ranks, in bfloat16, with moments of AdamW."""
    tag, classes = _tag_of(path), _deepspeed_classes()
    shapes = OrderedDict(w=torch.Size((12, 5)), b=torch.Size((7,)))
    flat = torch.rand(68)  # 67 elements and one of padding
    module = OrderedDict(w=flat[:60].reshape(12, 5), b=flat[60:67])
    module = OrderedDict((name, t.bfloat16()) for name, t in module.items())
    address = classes["fragment_address"]
    mappings = [
        OrderedDict(w=address(numel=34, start=0)),
        OrderedDict(w=address(numel=26, start=0), b=address(numel=7, start=26)),
    ]
    with _importable(classes):
        _save(tag / "mp_rank_00_model_states.pt", _model(module, shapes))
        for rank in range(2):
            part = flat[34 * rank : 34 * rank + 34]
            state = {
                "base_optimizer_state": _base([_moments(34)]),
                "single_partition_of_fp32_groups": [part[: 34 - rank].clone()],
                "zero_stage": classes["ZeroStageEnum"].optimizer_states,
                "group_paddings": [rank],
                "partition_count": [2],
                "param_slice_mappings": [mappings[rank]],
            }
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            _save(tag / name, _optim(state, classes))


def make_zero3(path):
    """Imitate ZeRO stage 3 of two ranks."""
    tag, classes = _tag_of(path), _deepspeed_classes()
    shapes = OrderedDict(w=torch.Size((12, 5)), b=torch.Size((7,)))
    module = OrderedDict((name, torch.empty(0).bfloat16()) for name in shapes)
    with _importable(classes):
        for rank in range(2):
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            _save(tag / name, _model(module, shapes))
            state = {
                "zero_stage": classes["ZeroStageEnum"].weights,
                "partition_count": 2,
                "optimizer_state_dict": _base([_moments(34)]),
                "fp32_flat_groups": [torch.rand(34)],  # 30 of w, 4 of b
            }
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            _save(tag / name, _optim(state, classes))


def make_universal(path):
    """Imitate what ds_to_universal.py makes of stage 1."""
    tag, classes = _tag_of(path, "latest_universal", "global_step2_universal"), {}
    shapes = OrderedDict(w=torch.Size((12, 5)), b=torch.Size((7,)))
    module = OrderedDict((n, torch.rand(s).bfloat16()) for n, s in shapes.items())
    with _importable(classes):
        _save(tag / "mp_rank_00_model_states.pt", _model(module, shapes))
        for name, shape in shapes.items():
            folder = tag / "zero" / name
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                _save(
                    folder / f"{state}.pt", {"param": torch.rand(shape), "cat_dim": 0}
                )
            _save(folder / "step.pt", 2)
        groups = {"param_groups": [{"lr": 1e-3, "params": [0]}]}
        _save(tag / "zero" / "optimizer_state.pt", groups)


def _tag_of(path, latest="latest", tag="global_step2"):
    (path / tag).mkdir(parents=True)
    (path / latest).write_text(tag)
    return path / tag


def _save(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def _model(module, shapes):
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": 2,
        "global_samples": 8,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 4},
        "ds_version": "0.19.8",
        "epoch": 1,
    }


def _optim(state, classes):
    inner = {
        "loss_scaler": classes["LossScaler"](1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "ds_version": "0.19.8",
        **state,
    }
    return {"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"}


def _base(states):
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(len(states)))}]
    return {"state": dict(enumerate(states)), "param_groups": groups}


def _moments(numel):
    return {
        "step": torch.tensor(2.0),
        "exp_avg": torch.rand(numel),
        "exp_avg_sq": torch.rand(numel),
    }


def _deepspeed_classes():
    class ZeroStageEnum(IntEnum):
        optimizer_states = 1
        weights = 3

    class LossScaler:
        def __init__(self, scale):
            self.cur_scale = scale
            self.dynamic = False

    class FragmentAddress:
        def __init__(self, numel, start):
            self.numel = numel
            self.start = start

    classes = {}
    for module, name, cls in [
        ("deepspeed.runtime.zero.config", "ZeroStageEnum", ZeroStageEnum),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler", LossScaler),
        ("deepspeed.utils.tensor_fragment", "fragment_address", FragmentAddress),
    ]:
        cls.__module__, cls.__qualname__, cls.__name__ = module, name, name
        classes[name] = cls
    return classes


def _importable(classes):
    """Let pickle find the classes where DeepSpeed has them, which is not imported."""
    modules = {}
    for name, cls in classes.items():
        path = cls.__module__
        while path:
            modules.setdefault(path, types.ModuleType(path))
            path = path.rpartition(".")[0]
        setattr(modules[cls.__module__], name, cls)
    return mock.patch.dict(sys.modules, modules)


# By name: the importer that takes it, and what makes it.
SAMPLES = {
    "dcp": ("dcp", make_dcp),
    "nemo": ("nemo", make_nemo),
    "nemo with common.pt": ("nemo", make_nemo_with_common_file),
    "nemo with digests": ("nemo", make_nemo_with_digests),
    "zero 1": ("deepspeed", make_zero1),
    "zero 3": ("deepspeed", make_zero3),
    "universal": ("deepspeed", make_universal),
}
