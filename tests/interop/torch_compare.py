"""Compares a checkpoint of ours, bit for bit, with what torch loads."""

import warnings

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import mpickpt


def loaded_by_dcp(path):
    """Return the state as DCP itself loads all of it."""
    state = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _load_state_dict(
            state,
            storage_reader=dcp.FileSystemReader(path),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    return state


def loaded_by_us(path):
    """Return the state of a checkpoint of ours, arrays whole."""
    with mpickpt.open_checkpoint(path) as checkpoint:
        return checkpoint.load()


def assert_same(ours, theirs, key=""):
    """Compare two trees: names, types, shapes and bits."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), key
        assert sorted(ours, key=str) == sorted(theirs, key=str), key
        for name, value in theirs.items():
            assert_same(ours[name], value, f"{key}/{name}")
    elif isinstance(theirs, list | tuple):
        assert type(ours) is type(theirs), key
        assert len(ours) == len(theirs), key
        for place, (own, value) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(own, value, f"{key}/{place}")
    elif isinstance(theirs, torch.Tensor):
        assert isinstance(ours, np.ndarray), (key, ours)
        assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch."), key
        assert ours.shape == tuple(theirs.shape), key
        assert ours.tobytes() == bits_of(theirs), key
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype, key
        assert ours.shape == theirs.shape, key
        assert ours.tobytes() == theirs.tobytes(), key
    else:
        assert type(ours) is type(theirs), (key, ours, theirs)
        assert repr(ours) == repr(theirs), key


def bits_of(tensor):
    """Return the bytes of a tensor in C order, of any type."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
