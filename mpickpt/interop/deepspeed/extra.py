"""Keeps what else a checkpoint of DeepSpeed says: counts, settings, client state."""

from typing import Any

from mpickpt.interop.deepspeed.pickles import PlainValues
from mpickpt.interop.deepspeed.tensor_parallel import INFO
from mpickpt.interop.sources.plain_objects import Settings

_OPTIMIZER = "optimizer"
# Of the model's files: what becomes of it is said elsewhere.
_PLACED = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
    }
)
_OWN = frozenset(
    {
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        INFO,
    }
)
_SCALER = (
    "dynamic_loss_scale",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
)
_OF_OPTIMIZER = ("overflow", "clip_grad")


def extra_values(
    first: dict[Any, Any], common: dict[Any, Any], values: PlainValues
) -> dict[Any, Any]:
    """Return what is neither the model nor the optimizer's states, as far as it can.

    Parameters
    ----------
    first : dict
        What is in the model's file.
    common : dict
        What the optimizer's file says beside the states.
    values : PlainValues
        Turns values into those of a state, and notes what it leaves out.
    """
    known = {name: value for name, value in first.items() if name in _OWN}
    extra = values.tree(known, "extra")
    client = {n: v for n, v in first.items() if n not in _OWN and n not in _PLACED}
    client_state = values.tree(client, "extra/client_state")
    if client_state:
        extra["client_state"] = client_state
    own = first.get(_OPTIMIZER)
    source = own if isinstance(own, dict) else common
    scaler = {name: source[name] for name in _SCALER if name in source}
    if isinstance(source.get("loss_scaler"), Settings):
        scaler |= source["loss_scaler"].attributes or {}
    rest = {name: source[name] for name in _OF_OPTIMIZER if name in source}
    for name, settings in (("loss_scaler", scaler), (_OPTIMIZER, rest)):
        made = values.tree(settings, f"extra/{name}")
        if made:
            extra[name] = made
    return extra
