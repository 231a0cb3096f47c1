"""Says where the entries of a Megatron checkpoint stand in a tree of ours; pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from mpickpt.format.tree import Key

Path = tuple[Key, ...]

COMMON: Path = ("extra", "common")
_OBJECTS: Path = ("extra", "objects")
_COMMON_NAMES = ("common_state", "common")

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optim(?:izer)?\.")
# Megatron's own names, and those of a state that a program put together itself.
_SLOT = re.compile(
    r"(?:chained_\d+\.)?"
    r"(?:optimizer\.state\.(?P<any>\w+)"
    r"|optim(?:izer)?\.(?P<known>exp_avg|exp_avg_sq|fp32_param|momentum_buffer))"
    r"\.(?P<name>.+)",
    re.DOTALL,
)
_MASTER = "fp32_param"
_OBJECT = re.compile(r"(?P<key>.+)/(?P<shard>shard_[\d.]*_[\d.]*)", re.DOTALL)
_PREFIXES = ("model.", "module.")


@dataclass(frozen=True, slots=True)
class Naming:
    """How the names of one checkpoint are read.

    Parameters
    ----------
    prefix : str
        What all names of parameters begin with, and the tree leaves out.
    """

    prefix: str

    @classmethod
    def of(cls, tensors: Iterable[str]) -> "Naming":
        """Return the naming of a checkpoint with these tensors."""
        names = [name for name in tensors if not _OPTIMIZER.match(name)]
        for prefix in _PREFIXES:
            if names and all(name.startswith(prefix) for name in names):
                return cls(prefix)
        return cls("")

    def tensor(self, name: str) -> Path:
        """Return the place of a tensor.

        Weights stand below "model", fp32 weights of the optimizer below "master", its
        other state by weight below "optimizer/state". What it keeps for all weights
        as one buffer stays as it is, below "optimizer/buffers".
        """
        if not _OPTIMIZER.match(name):
            return ("model", name.removeprefix(self.prefix))
        found = _SLOT.fullmatch(name)
        if found is None:
            return ("optimizer", "buffers", name)
        slot = found["any"] or found["known"]
        weight = found["name"].removeprefix(self.prefix)
        if slot == _MASTER:
            return ("master", weight)
        return ("optimizer", "state", weight, slot)

    def value(self, name: str) -> Path:
        """Return the place of anything else: an object, or the common state."""
        found = _OBJECT.fullmatch(name)
        if found is None:
            return (*_OBJECTS, name)
        if found["key"] in _COMMON_NAMES:
            return COMMON
        return (*_OBJECTS, found["key"], found["shard"])
