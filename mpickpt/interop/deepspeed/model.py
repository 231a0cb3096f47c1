"""Makes the part of a state that is the model of a DeepSpeed checkpoint; pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpickpt.errors import ManifestError
from mpickpt.interop.deepspeed.parameters import Parameters
from mpickpt.interop.deepspeed.pickles import PlainValues, mapping, shape_of
from mpickpt.interop.deepspeed.shard import FP32
from mpickpt.interop.deepspeed.tensor_parallel import INFO, TensorParallelLayout
from mpickpt.interop.sources.flat_range import boxes_of_flat_range
from mpickpt.interop.sources.reading import Pieces, SourceReading
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.interop.ties import tie
from mpickpt.state import Shape

_MODULE = "module"
_FROZEN_SHAPES = "frozen_param_shapes"
_FROZEN = "frozen_param_fragments"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What is in the model's files.

    Attributes
    ----------
    grid : tuple of tuple of dict
        By tensor-parallel and data-parallel rank; stages below 3 have one of these.
    is_derived : bool
        The files have no elements of trained parameters, or older ones: they are the
        masters, rounded. So does DeepSpeed when it loads.
    where : str
        The checkpoint, for errors.
    """

    grid: tuple[tuple[dict[Any, Any], ...], ...]
    is_derived: bool
    where: str

    @property
    def first(self) -> dict[Any, Any]:
        """The file that is asked for what all have alike."""
        return self.grid[0][0]

    @property
    def modules(self) -> list[dict[str, Any]]:
        """What ``module.state_dict()`` gave, by tensor-parallel rank."""
        found = [column[0].get(_MODULE) for column in self.grid]
        return [mapping(module, self.where, _MODULE) for module in found]

    @property
    def aliases(self) -> dict[str, str]:
        """Tied parameters: the name of each that stands for another."""
        shared = self.first.get("shared_params") or {}
        pairs = mapping(shared, self.where, "shared_params").items()
        return {str(alias): str(name) for alias, name in pairs}

    @property
    def buffers(self) -> frozenset[str]:
        """Names of what is no parameter."""
        return frozenset(map(str, self.first.get("buffer_names") or ()))

    def trained(self) -> dict[str, Shape]:
        """Return names and shapes of the parameters, each once, in order."""
        buffers, aliases = self.buffers, self.aliases
        seen = set()
        shapes = {}
        for name, tensor in self.modules[0].items():
            if not isinstance(tensor, StoredTensor) or name in buffers:
                continue
            if name in aliases or (tensor.size and tensor.place in seen):
                continue
            seen.add(tensor.place)
            shapes[name] = tensor.shape
        return shapes


def model_tree(
    model: ModelFiles,
    parameters: Parameters,
    values: PlainValues,
    reading: SourceReading,
) -> dict[str, Any]:
    """Return parameters and buffers by name; aliases as ties.

    Parameters
    ----------
    model : ModelFiles
        What is in the model's files.
    parameters : Parameters
        The trained ones.
    values : PlainValues
        Turns what a module has beside tensors.
    reading : SourceReading
        Makes arrays.

    Raises
    ------
    ManifestError
        If a part of a parameter is missing, or the parts do not fit together.
    """
    modules = model.modules
    _require_all(modules[0], model, parameters)
    whole = _whole_shapes(model, parameters)
    aliases = model.aliases
    tree: dict[str, Any] = {}
    seen: dict[Any, str] = {}
    for name, value in modules[0].items():
        real = aliases.get(name)
        if not isinstance(value, StoredTensor):
            tree |= values.tree({name: value}, "model")
        elif real is not None and real in modules[0]:
            tree[name] = tie(real)
        elif model.is_derived and name in parameters.shapes:
            tree[name] = reading.array(
                parameters.shapes[name],
                value.dtype,
                parameters.arrays[FP32][name].pieces,
                use="model",
            )
        elif value.size and value.place in seen:
            tree[name] = tie(seen[value.place])
        else:
            seen[value.place] = name
            tree[name] = _stored(model, name, value, whole, reading)
    return tree


def _require_all(
    module: dict[str, Any], model: ModelFiles, parameters: Parameters
) -> None:
    if model.first.get("param_shapes") is None:  # without ZeRO, names are guessed
        return
    missing = [
        name
        for name in parameters.shapes
        if not isinstance(module.get(name), StoredTensor)
    ]
    if missing:
        raise ManifestError(
            f"{model.where}: the model's file lacks {missing[:5]}, which the optimizer "
            "trains"
        )


def _stored(
    model: ModelFiles,
    name: str,
    value: StoredTensor,
    whole: "TensorParallelLayout | None",
    reading: SourceReading,
) -> Any:
    frozen = model.first.get(_FROZEN_SHAPES) or {}
    shape = shape_of(frozen.get(name, value.shape), model.where, name)
    if math.prod(shape) != value.size:  # stage 3 leaves nothing in its place
        return reading.array(shape, value.dtype, _frozen_pieces(model, name, shape))
    if whole is None or name in model.buffers:
        return reading.whole(value)
    pieces: Pieces = []
    for tp, module in enumerate(model.modules):
        corner, part = whole.corner(name, tp), module.get(name)
        if corner is not None and isinstance(part, StoredTensor):
            pieces.append((corner, part))
    return reading.array(whole.shape(name), value.dtype, pieces)


def _frozen_pieces(model: ModelFiles, name: str, shape: Shape) -> Pieces:
    """Return the parts that the ranks of stage 3 have of a parameter nobody trains."""
    if len(model.grid) > 1:
        raise ManifestError(
            f"{model.where}: {name!r} is frozen and split over tensor-parallel ranks, "
            "which is not imported"
        )
    numel, count = math.prod(shape), len(model.grid[0])
    part = -(-numel // count)
    pieces: Pieces = []
    for rank, content in enumerate(model.grid[0]):
        tensor = mapping(content.get(_FROZEN), model.where, _FROZEN).get(name)
        start = min(rank * part, numel)
        stop = min(start + part, numel)
        if (
            not isinstance(tensor, StoredTensor)
            or not tensor.is_contiguous
            or tensor.size < stop - start
        ):
            raise ManifestError(
                f"{model.where}: rank {rank} has not its part of the frozen {name!r}"
            )
        pieces += [
            (box.offset, tensor.run(first - start, box.shape))
            for box, first in boxes_of_flat_range(shape, start, stop)
        ]
    return pieces


def _whole_shapes(
    model: ModelFiles, parameters: Parameters
) -> TensorParallelLayout | None:
    """Return how the parts of parameters that lie in the model's files are placed."""
    if len(model.grid) == 1:
        return None
    left_out = model.buffers | (parameters.shapes.keys() if model.is_derived else set())
    shapes: Sequence[Mapping[str, Shape]] = [
        {
            name: tensor.shape
            for name, tensor in module.items()
            if isinstance(tensor, StoredTensor) and name not in left_out
        }
        for module in model.modules
    ]
    return TensorParallelLayout(shapes, model.first.get(INFO), model.where)
