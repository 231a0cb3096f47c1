"""What DeepSpeed's pickles may name, and what plain values become of theirs; no I/O."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpickpt.errors import ManifestError
from mpickpt.interop.sources.allowlist import Allowlist
from mpickpt.interop.sources.plain_objects import (
    PLAIN_OBJECTS,
    SCALARS,
    NumpyArray,
    Settings,
    plainer,
)
from mpickpt.interop.sources.reading import SourceReading
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.interop.sources.stubs import (
    Enumeration,
    Stub,
    StubDict,
)

_MOST_DEPTH = 64
# What refers to itself many times can be said in few bytes.
_MOST_VALUES = 2_000_000


@dataclass(frozen=True)
class FragmentAddress(Stub):
    """Where a parameter lies in a rank's flat partition, in elements."""

    numel: Any = None
    start: Any = None


def _zero_stage(number: Any) -> int:
    if type(number) is not int:
        raise TypeError("a stage of ZeRO that is no number")
    return number


_STAGES = Enumeration(
    _zero_stage,
    {
        "disabled": 0,
        "optimizer_states": 1,
        "gradients": 2,
        "weights": 3,
        "max_stage": 3,
    },
)
_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_FRAGMENT = "fragment_address"
DEEPSPEED: Allowlist = PLAIN_OBJECTS | {
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): _STAGES,
    ("deepspeed.utils.tensor_fragment", _FRAGMENT): FragmentAddress,
    # Where it was before version 0.8.1.
    ("deepspeed.runtime.utils", _FRAGMENT): FragmentAddress,
    ("deepspeed.runtime.utils", "MemoryFragment"): FragmentAddress,
    (_SCALER, "LossScaler"): Settings,
    (_SCALER, "DynamicLossScaler"): Settings,
    (_SCALER, "LossScalerBase"): Settings,
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"): Settings,
}


class PlainValues:
    """Turns values of a pickle into those of a state, and counts what cannot be.

    Parameters
    ----------
    reading : SourceReading
        Makes arrays of tensors.
    where : str
        The file, for errors.

    Attributes
    ----------
    left_out : list of str
        Place and class of what is neither a plain value nor an array.
    """

    def __init__(self, reading: SourceReading, where: str) -> None:
        self.left_out: list[str] = []
        self._reading = reading
        self._where = where
        self._n_values = 0

    def tree(self, values: dict[Any, Any], place: str) -> dict[Any, Any]:
        """Return the values below a place; None and what cannot be saved are left out.

        Raises
        ------
        ManifestError
            If they are nested too deep, or too many.
        """
        found = {}
        for name, value in values.items():
            if value is not None and self.is_key(name, place):
                made = self.value(value, f"{place}/{name}")
                if made is not _NOTHING:
                    found[name] = made
        return found

    def settings(self, group: dict[Any, Any]) -> dict[Any, Any]:
        """Return the settings of a parameter group; those that are None too."""
        made = {
            name: self.value(value, f"optimizer/param_groups/{name}")
            for name, value in group.items()
            if self.is_key(name, "optimizer/param_groups")
        }
        return {name: value for name, value in made.items() if value is not _NOTHING}

    def value(self, value: Any, place: str, depth: int = 0) -> Any:
        """Return a value as it is saved, or a mark where it cannot be."""
        self._n_values += 1
        if depth > _MOST_DEPTH or self._n_values > _MOST_VALUES:
            raise ManifestError(
                f"{self._where}: {place} is nested too deep, or has too many values"
            )
        if type(value) in SCALARS or isinstance(value, np.generic):
            return value
        if isinstance(value, StoredTensor):
            return self._reading.whole(value)
        if isinstance(value, NumpyArray) and isinstance(value.array, np.ndarray):
            return self._reading.held(value.array)
        meant = plainer(value)
        if meant is not value:
            return self.value(meant, place, depth + 1)
        return self._container(value, place, depth)

    def is_key(self, name: Any, place: str) -> bool:
        """Tell whether a state can have this key; note it if not."""
        if type(name) in (str, int):
            return True
        self.left_out.append(f"{place}[{str(name)[:80]}]")
        return False

    def _container(self, value: Any, place: str, depth: int) -> Any:
        if type(value) in (dict, StubDict):
            made = {
                name: self.value(item, f"{place}/{name}", depth + 1)
                for name, item in value.items()
                if self.is_key(name, place)
            }
            return {name: item for name, item in made.items() if item is not _NOTHING}
        if type(value) in (list, tuple):
            items = [self.value(item, place, depth + 1) for item in value]
            if all(item is not _NOTHING for item in items):
                return type(value)(items)
            return _NOTHING
        self.left_out.append(f"{place} ({type(value).__name__})")
        return _NOTHING


_NOTHING = object()


def shape_of(value: Any, where: str, name: str) -> tuple[int, ...]:
    """Return a shape that a file gives; `torch.Size` has become a tuple."""
    if type(value) in (tuple, list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    raise ManifestError(f"{where}: the shape of {name!r} is {str(value)[:80]}")


def mapping(value: Any, where: str, name: str) -> dict[Any, Any]:
    """Return a dict that a file must have.

    Raises
    ------
    ManifestError
        If it is none.
    """
    if isinstance(value, dict):
        return value
    raise ManifestError(
        f"{where} has no {name!r}, or not the one that DeepSpeed writes"
    )


def sequence(value: Any, where: str, name: str) -> list[Any]:
    """Return a list that a file must have; ManifestError if it is none."""
    if type(value) in (list, tuple):
        return list(value)
    raise ManifestError(
        f"{where} has no {name!r}, or not the one that DeepSpeed writes"
    )


def version_of(value: Any) -> str:
    """Return a version for people: major and minor alone."""
    match = re.match(r"\d+\.\d+", value) if isinstance(value, str) else None
    return match[0] if match else "of an unknown version"
