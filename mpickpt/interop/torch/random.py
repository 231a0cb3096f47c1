"""Saves random generators: torch's, and with `RandomState` all that a process has."""

import random
from typing import Any

import numpy as np
import torch

from mpickpt.errors import StateTypeError
from mpickpt.interop.torch.tensors import array_of, tensor_of
from mpickpt.state import RESIZE_RULES, ResizeRule

Array = np.ndarray[Any, Any]


class RandomState:
    """All global random generators of this process, each rank's own.

    They are torch's CPU generator, that of the current CUDA device once CUDA is in
    use, Python's `random`, and numpy's legacy global one. A `numpy.random.Generator`
    is none of them: put it into the tree itself.

    Parameters
    ----------
    on_resize : {"error", "keep", "first", "modulo"} or callable
        What a load on another number of ranks does; see `mpickpt.PerRank`.
    """

    def __init__(self, on_resize: ResizeRule = "error") -> None:
        if not callable(on_resize) and on_resize not in RESIZE_RULES:
            raise ValueError(
                f"RandomState on_resize {on_resize!r} is neither one of "
                f"{RESIZE_RULES} nor a callable"
            )
        self.on_resize = on_resize


class Streams:
    """The global generators as a live object."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator; None where there is none."""
        state: dict[str, Any] = {
            "torch": array_of(torch.get_rng_state(), "torch"),
            "cuda": None,
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = array_of(torch.cuda.get_rng_state(), "cuda")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set each generator; a CUDA state waits for no device that is not there."""
        torch.set_rng_state(_bytes(state["torch"]))
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_bytes(state["cuda"]))


class GeneratorState:
    """One `torch.Generator` as a live object."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the bytes of its state, and the kind of device that they are of."""
        state = array_of(self.generator.get_state(), "state")
        return {"state": state, "device": self.generator.device.type}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set its state.

        Raises
        ------
        StateTypeError
            The state is that of a generator of another kind of device.
        """
        here = self.generator.device.type
        if state["device"] != here:
            raise StateTypeError(
                f"the state of a generator on {state['device']!r} does not fit one on "
                f"{here!r}"
            )
        self.generator.set_state(_bytes(state["state"]))


def _bytes(array: Any) -> Any:
    return tensor_of(np.ascontiguousarray(array, np.uint8)).clone()
