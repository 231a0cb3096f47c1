"""Reads what the files of a universal checkpoint of DeepSpeed say; pure.

Each state of each parameter lies in a file of its own, whole.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mpickpt.errors import IncompleteCheckpointError, ManifestError
from mpickpt.interop.deepspeed.files import DeepSpeedFiles
from mpickpt.interop.deepspeed.parameters import Parameters, Split
from mpickpt.interop.deepspeed.pickles import mapping, sequence
from mpickpt.interop.deepspeed.shard import FP32
from mpickpt.interop.deepspeed.zero import groups_of, parse_shapes, states_of
from mpickpt.interop.sources.reading import SourceReading
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.state import Shape

_PARAM = "param"
_INNER = "optimizer_state_dict"
_STEP = "step"

States = dict[str, dict[str, Any]]


def universal_parameters(
    files: DeepSpeedFiles,
    contents: Mapping[str, Any],
    reading: SourceReading,
) -> Parameters:
    """Return the parameters of a universal checkpoint.

    Parameters
    ----------
    files : DeepSpeedFiles
        Its files.
    contents : mapping of str to object
        What is in each of them.
    reading : SourceReading
        Says what this rank reads.

    Raises
    ------
    IncompleteCheckpointError
        If a parameter that the model's files name is missing.
    ManifestError
        If they do not fit together.
    """
    by_tp = [parse_shapes(contents[file.name], file.name) for file in files.model]
    groups = _joined(by_tp)
    # Of a stage 3 the model's files are of data-parallel ranks, all with one shape.
    is_whole = len({file.tp for file in files.model}) == 1
    states: States = defaultdict(dict)
    for file in files.universal:
        states[file.parameter][file.state] = contents[file.name]
    found = Parameters(groups=_settings(files, contents, groups))
    for group, shapes in enumerate(groups):
        shared = _shared_states(files, contents, group, len(groups))
        _require_alike(files, states, list(shapes))
        for name, shape in shapes.items():
            if FP32 not in states[name]:
                raise IncompleteCheckpointError(
                    f"{files.directory}/zero has no {FP32}.pt of {name!r}",
                    path=files.directory,
                )
            wanted = shape if is_whole else None
            _add(found, name, states[name], wanted, shared, files)
    found.keep_own(reading)
    known = {name for shapes in groups for name in shapes}
    found.left_out.extend(
        f"state {state!r} of {name!r}"
        for name in sorted(set(states) - known)
        for state in sorted(set(states[name]) - {FP32})
    )
    return found


def _require_alike(files: DeepSpeedFiles, states: States, names: Sequence[str]) -> None:
    """Raise unless all parameters of a group have the same states, as their rule does.

    Raises
    ------
    IncompleteCheckpointError
        If a file of one of them is missing.
    """
    everything = {state for name in names for state in states[name]}
    for name in names:
        if missing := sorted(everything - set(states[name])):
            raise IncompleteCheckpointError(
                f"{files.directory}/zero/{name} has no {missing[0]}.pt, which other "
                "parameters have",
                path=f"{files.directory}/zero/{name}/{missing[0]}.pt",
            )


def _joined(by_tp: Sequence[tuple[dict[str, Shape], ...]]) -> list[dict[str, Shape]]:
    """Return the parameters of all groups; stages of a pipeline have several each."""
    groups: list[dict[str, Shape]] = [{} for _ in max(by_tp, key=len)]
    for shapes_by_group in by_tp:
        for joined, shapes in zip(groups, shapes_by_group, strict=False):
            joined.update({n: s for n, s in shapes.items() if n not in joined})
    return groups


def _add(
    found: Parameters,
    name: str,
    states: dict[str, Any],
    wanted: Shape | None,
    shared: dict[str, Any],
    files: DeepSpeedFiles,
) -> None:
    where = f"{files.directory}/zero/{name}"
    whole = _shape(_tensor(states[FP32], where), wanted, states[FP32], where)
    found.shapes[name] = whole
    found.scalars[name] = {k: v for k, v in shared.items() if k not in states}
    for state, value in states.items():
        if state == _STEP or not _is_tensor(value):
            found.scalars[name][state] = value
            continue
        tensor = _tensor(value, where)
        if tensor.size != math.prod(whole):
            raise ManifestError(
                f"{where}: {state!r} has shape {tensor.shape}, and {whole} is expected"
            )
        pieces = [((0,) * len(whole), _as_shape(tensor, whole))]
        split = Split(tensor.dtype, pieces)
        found.arrays.setdefault(state, {})[name] = split


def _as_shape(tensor: StoredTensor, shape: Shape) -> StoredTensor:
    return tensor if tensor.shape == shape else tensor.run(0, shape)


def _shape(tensor: StoredTensor, wanted: Shape | None, value: Any, where: str) -> Shape:
    if wanted is not None and math.prod(wanted) == tensor.size:
        return wanted
    if isinstance(value, dict):  # vocabularies are stored without their padding
        return tensor.shape
    raise ManifestError(
        f"{where}: its masters have {tensor.size} elements, and the model's file says "
        f"the shape is {wanted}"
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict | StoredTensor)


def _tensor(value: Any, where: str) -> StoredTensor:
    if isinstance(value, dict):
        value = value.get(_PARAM)
    if isinstance(value, StoredTensor):
        return value
    raise ManifestError(f"{where} has a file without a tensor")


def _shared_states(
    files: DeepSpeedFiles, contents: Mapping[str, Any], group: int, count: int
) -> dict[str, Any]:
    """Return the counts that stage 3 leaves in the file for all parameters."""
    inner = _common(files, contents).get(_INNER)
    if not isinstance(inner, dict):
        return {}
    states = states_of(inner, str(files.common), count)
    return {
        str(key): value
        for key, value in states[group].items()
        if not isinstance(value, StoredTensor) or not value.shape
    }


def _settings(
    files: DeepSpeedFiles,
    contents: Mapping[str, Any],
    groups: Sequence[dict[str, Shape]],
) -> list[tuple[dict[Any, Any], list[str]]]:
    where = f"{files.directory}/{files.common}"
    said = _common(files, contents).get("param_groups")
    if said is None:
        return [({}, list(shapes)) for shapes in groups]
    return groups_of(sequence(said, where, "param_groups"), groups, where)


def _common(files: DeepSpeedFiles, contents: Mapping[str, Any]) -> dict[Any, Any]:
    if files.common is None:
        return {}
    return mapping(contents[files.common], files.common, "optimizer state")
