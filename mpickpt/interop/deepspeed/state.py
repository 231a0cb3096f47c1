"""Puts the state together that a checkpoint of DeepSpeed becomes; reads no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpickpt.errors import IncompleteCheckpointError, ManifestError
from mpickpt.interop.deepspeed.extra import extra_values
from mpickpt.interop.deepspeed.files import DeepSpeedFiles, RankFile
from mpickpt.interop.deepspeed.model import ModelFiles, model_tree
from mpickpt.interop.deepspeed.parameters import Parameters, parameters_of
from mpickpt.interop.deepspeed.pickles import (
    DEEPSPEED,
    PlainValues,
    mapping,
    version_of,
)
from mpickpt.interop.deepspeed.plain import plain_parameters
from mpickpt.interop.deepspeed.shard import FP32, ZeroShard
from mpickpt.interop.deepspeed.tensor_parallel import INFO, TensorParallelLayout
from mpickpt.interop.deepspeed.universal import universal_parameters
from mpickpt.interop.deepspeed.zero import parse_shapes, parse_shard
from mpickpt.interop.sources.reading import SourceReading
from mpickpt.interop.sources.torch_file import TorchFile
from mpickpt.state import Sharded

_OPTIMIZER = "optimizer"
_STEPS = "global_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedState:
    """What is saved: the tree of one rank, the step, and where it came from.

    `reading` has the files, which are to be closed when the state was saved.
    """

    tree: dict[str, Any]
    step: int
    about: dict[str, Any]
    reading: SourceReading


def imported_state(
    files: DeepSpeedFiles, opened: Mapping[str, TorchFile], rank: int, size: int
) -> ImportedState:
    """Return the state that one rank saves.

    Parameters
    ----------
    files : DeepSpeedFiles
        The files of the checkpoint.
    opened : mapping of str to TorchFile
        Each of them.
    rank, size : int
        Which of how many ranks.

    Raises
    ------
    IncompleteCheckpointError
        If they are not all files of one save.
    ManifestError
        If they do not fit together, or are of a kind that is not imported.
    """
    contents = {name: file.load(DEEPSPEED) for name, file in opened.items()}
    reading = SourceReading(opened, rank, size)
    values = PlainValues(reading, files.directory)
    model = _model_files(files, contents)
    parameters, kind, common = _parameters(files, contents, model, reading)
    tree = {
        "model": _model(model, parameters, values, reading),
        "master": _arrays(parameters, FP32, reading),
        _OPTIMIZER: _optimizer(parameters, values, reading),
        "extra": extra_values(model.first, common, values),
    }
    return ImportedState(
        tree={name: part for name, part in tree.items() if part},
        step=_step(model.first, files),
        about={
            "from": f"deepspeed {version_of(model.first.get('ds_version'))}",
            "source": files.directory,
            "kind": kind,
            "data_parallel_ranks": model.first.get("dp_world_size"),
            "tensor_parallel_ranks": len({file.tp for file in files.model}),
            "model_from_masters": model.is_derived,
            "left_out": sorted(values.left_out + parameters.left_out),
            "without_checksums": [
                name for name, file in opened.items() if not file.is_checked
            ],
        },
        reading=reading,
    )


def _model_files(files: DeepSpeedFiles, contents: Mapping[str, Any]) -> ModelFiles:
    grid = _grid(files, files.model)
    return ModelFiles(
        grid=tuple(
            tuple(mapping(contents[name], name, "a state") for name in column)
            for column in grid
        ),
        is_derived=_is_stage3(files) or bool(files.universal),
        where=files.directory,
    )


def _is_stage3(files: DeepSpeedFiles) -> bool:
    """Tell whether each data-parallel rank has a file of the model."""
    return any(file.name.startswith("zero_pp_rank") for file in files.model)


def _grid(files: DeepSpeedFiles, of_ranks: tuple[RankFile, ...]) -> list[list[str]]:
    """Return names by tensor-parallel and data-parallel rank; none may be missing."""
    columns: list[list[str]] = []
    for file in of_ranks:  # in order
        if file.tp == len(columns) and file.dp == 0:
            columns.append([])
        if file.tp != len(columns) - 1 or file.dp != len(columns[-1]):
            raise _missing(files, f"of the rank before that of {file.name}")
        columns[-1].append(file.name)
    if len({len(column) for column in columns}) > 1:
        raise _missing(files, "of some data-parallel ranks")
    return columns


def _missing(files: DeepSpeedFiles, what: str) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"{files.directory} lacks the file {what}", path=files.directory
    )


def _parameters(
    files: DeepSpeedFiles,
    contents: Mapping[str, Any],
    model: ModelFiles,
    reading: SourceReading,
) -> tuple[Parameters, str, dict[Any, Any]]:
    """Return the trained parameters, the kind of the checkpoint, and what is common."""
    if files.universal:
        common = contents[files.common] if files.common else {}
        found = universal_parameters(files, contents, reading)
        return found, "universal", mapping(common, files.directory, _OPTIMIZER)
    if model.first.get("param_shapes") is not None:
        shards = _shards(files, contents, model)
        first = contents[files.optim[0].name]["optimizer_state_dict"]
        info = model.first.get(INFO, first.get(INFO))
        layout = TensorParallelLayout(
            [shard.shapes for shard in shards], info, files.directory
        )
        stage = first.get("zero_stage", shards[0].stage)
        return parameters_of(shards, layout, reading), f"ZeRO stage {stage}", first
    if files.optim:
        raise ManifestError(
            f"{files.directory} has files of ZeRO's optimizer, and model's files "
            "that are not of ZeRO: they are not of one save"
        )
    return *_unsplit(files, model, reading), {}


def _shards(
    files: DeepSpeedFiles, contents: Mapping[str, Any], model: ModelFiles
) -> list[ZeroShard]:
    columns = _grid(files, files.optim)
    if len(columns) != len(model.grid):
        raise _missing(files, "of the optimizer of some ranks")
    expected = model.first.get("dp_world_size")
    if expected not in (None, len(columns[0])):
        raise _missing(
            files,
            f"of the optimizer of some ranks: {len(columns[0])} are there, and the "
            f"model's file says {expected}",
        )
    if _is_stage3(files) and len(model.grid[0]) != len(columns[0]):
        raise _missing(files, "of the model of some ranks")
    return [
        parse_shard(
            parse_shapes(column[0], files.directory),
            [(name, mapping(contents[name], name, "a state")) for name in names],
        )
        for column, names in zip(model.grid, columns, strict=True)
    ]


def _unsplit(
    files: DeepSpeedFiles, model: ModelFiles, reading: SourceReading
) -> tuple[Parameters, str]:
    optimizer = model.first.get(_OPTIMIZER)
    if not isinstance(optimizer, dict):
        return Parameters(), "without an optimizer"
    if len(model.grid) > 1:
        raise ManifestError(
            f"{files.directory} is of {len(model.grid)} tensor-parallel ranks without "
            "ZeRO, whose optimizers have no names: this is not imported"
        )
    where = f"{files.directory}/{files.model[0].name}"
    return (
        plain_parameters(optimizer, model.trained(), reading, where),
        "without ZeRO",
    )


def _model(
    model: ModelFiles,
    parameters: Parameters,
    values: PlainValues,
    reading: SourceReading,
) -> dict[str, Any]:
    if model.first.get("module") is None:  # stages of a pipeline have files of layers
        values.left_out.append("model (module): its layers lie in files of their own")
        return {}
    return model_tree(model, parameters, values, reading)


def _arrays(
    parameters: Parameters, state: str, reading: SourceReading
) -> dict[str, Sharded]:
    return {
        name: reading.array(parameters.shapes[name], split.dtype, split.pieces)
        for name, split in parameters.arrays.get(state, {}).items()
    }


def _optimizer(
    parameters: Parameters, values: PlainValues, reading: SourceReading
) -> dict[str, Any]:
    if not parameters.groups:
        return {}
    states: dict[str, dict[Any, Any]] = {}
    for name, scalars in parameters.scalars.items():
        states[name] = values.tree(scalars, f"{_OPTIMIZER}/state/{name}")
    for state in parameters.arrays:
        if state != FP32:
            for name, array in _arrays(parameters, state, reading).items():
                states[name][state] = array
    return {
        "state": {name: state for name, state in states.items() if state},
        "param_groups": [
            {"params": names, **values.settings(settings)}
            for settings, names in parameters.groups
        ],
    }


def _step(first: dict[Any, Any], files: DeepSpeedFiles) -> int:
    step = first.get(_STEPS)
    return step if type(step) is int and step >= 0 else 0
