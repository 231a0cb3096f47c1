"""Finds out what state an optimizer is going to keep, before its first step.

Most optimizers make their state in the first step, so a program that resumes has none
to fill. The step is taken by a twin with parameters of its own, all zero.
"""

import copy
import logging
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from mpickpt.interop.torch.dtensor import is_dtensor
from mpickpt.interop.torch.tensors import is_tensor

log = logging.getLogger(__name__)

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class FreshStates:
    """Makes the state that an optimizer would have made for each parameter.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Left as it is.

    Notes
    -----
    The twin steps once for each kind of parameter, one at a time: it takes little
    memory, and ten thousand parameters take few steps.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._of_kind: dict[Any, dict[str, Any] | None] = {}

    def of(self, group: int, parameter: Any) -> dict[str, Any] | None:
        """Return a parameter's state, whose values mean nothing.

        None where nobody can know it: the optimizer wants a closure, or sparse
        gradients.
        """
        kind = (group, _kind_of(parameter))
        if kind not in self._of_kind:
            self._of_kind[kind] = self._step(group, parameter)
        made = self._of_kind[kind]
        return None if made is None else {k: _another(v) for k, v in made.items()}

    def _step(self, group: int, parameter: Any) -> dict[str, Any] | None:
        twin_parameter = torch.zeros_like(parameter).requires_grad_()
        twin_parameter.grad = torch.zeros_like(twin_parameter)
        twin = self._twin(group, twin_parameter)
        try:
            with torch.random.fork_rng(devices=[]):
                # The class's: a scheduler wraps the instance's, to count its calls.
                type(self.optimizer).step(twin)
        except Exception as error:  # anybody's optimizer may want more than that
            log.debug("no state of %s is known: %s", type(twin).__name__, error)
            return None
        return dict(twin.state[twin_parameter])

    def _twin(self, group: int, parameter: Any) -> Any:
        twin = object.__new__(type(self.optimizer))
        twin.__dict__.update(self.optimizer.__dict__)
        twin.__dict__.update({name: OrderedDict() for name in _HOOKS})
        options = self.optimizer.param_groups[group].items()
        copied = {k: _another(v) for k, v in options if k != "params"}
        twin.param_groups = [{**copied, "params": [parameter]}]
        twin.state = defaultdict(dict)
        return twin


def _kind_of(parameter: Any) -> Any:
    """Return what decides about the state of a parameter."""
    layout = (parameter.dtype, tuple(parameter.shape), parameter.stride())
    if is_dtensor(parameter):
        mesh = parameter.device_mesh
        return (*layout, parameter.device, mesh, tuple(parameter.placements))
    return (*layout, parameter.device)


def _another(value: Any) -> Any:
    """Return a value that shares nothing with the one given."""
    if is_tensor(value):
        return value.detach().clone()
    return copy.deepcopy(value)
