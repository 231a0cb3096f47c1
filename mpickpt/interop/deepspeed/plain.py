"""Reads the optimizer of a DeepSpeed checkpoint without ZeRO; pure.

It lies whole in the model's file, by numbers: names have to be found.
"""

import math
from collections.abc import Mapping
from typing import Any

from mpickpt.interop.deepspeed.parameters import Parameters, Split
from mpickpt.interop.deepspeed.pickles import mapping, sequence
from mpickpt.interop.deepspeed.shard import FP32
from mpickpt.interop.sources.reading import SourceReading
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.state import Shape

_INNER = "optimizer_state_dict"
_MASTERS = ("fp32_groups", "fp32_groups_flat")

Group = list[tuple[str, Shape | None]]


def plain_parameters(
    optimizer: dict[Any, Any],
    trained: Mapping[str, Shape],
    reading: SourceReading,
    where: str,
) -> Parameters:
    """Return the parameters of an optimizer that is not split.

    Parameters
    ----------
    optimizer : dict
        Of the model's file: torch's own, or one that keeps masters beside it.
    trained : mapping of str to tuple of int
        Names and shapes of the model's parameters, in its order.
    reading : SourceReading
        Says what this rank reads.
    where : str
        The file, for errors.

    Notes
    -----
    The names are those that the optimizer has, or the model's in its order where their
    shapes agree; else "group.index", which `left_out` says.
    """
    inner = mapping(optimizer.get(_INNER, optimizer), where, "optimizer")
    param_groups = sequence(inner.get("param_groups"), where, "param_groups")
    states = mapping(inner.get("state"), where, "state")
    masters = [
        sequence(group, where, "masters") if type(group) in (list, tuple) else [group]
        for group in _masters(optimizer)
    ]
    is_flat = _MASTERS[1] in optimizer
    found = Parameters()
    shapes = _shapes(param_groups, states, masters, is_flat)
    if is_flat and _is_all(masters, trained):
        shapes = [list(trained.values())]
    names = _names(param_groups, shapes, trained)
    if names is not None:
        shapes = _completed(names, shapes, trained)
    else:
        found.left_out.append("the optimizer's names: group.index in their place")
        names = [[f"{g}.{i}" for i in range(len(s))] for g, s in enumerate(shapes)]
    for number, group in enumerate(param_groups):
        skipped = ("params", "param_names")
        settings = {k: v for k, v in group.items() if k not in skipped}
        found.groups.append((settings, names[number]))
        held = masters[number] if number < len(masters) else []
        _add_group(
            found,
            list(zip(names[number], shapes[number], strict=True)),
            [states.get(each, {}) for each in group["params"]],
            held,
        )
    found.keep_own(reading)
    return found


def _masters(optimizer: dict[Any, Any]) -> list[Any]:
    said: Any = next((optimizer[key] for key in _MASTERS if key in optimizer), ())
    return list(said) if type(said) in (list, tuple) else []


def _is_all(masters: list[list[Any]], trained: Mapping[str, Shape]) -> bool:
    """Tell whether there is one vector of masters, of all the model's parameters."""
    vectors = [vector for group in masters for vector in group]
    numel = sum(map(math.prod, trained.values()))
    return (
        len(vectors) == 1
        and isinstance(vectors[0], StoredTensor)
        and vectors[0].size == numel
    )


def _shapes(
    param_groups: list[Any],
    states: dict[Any, Any],
    masters: list[list[Any]],
    is_flat: bool,
) -> list[list[Shape | None]]:
    """Return the shapes of each group's parameters, None where none is told."""
    found = []
    for number, group in enumerate(param_groups):
        shapes: list[Shape | None] = []
        held = masters[number] if number < len(masters) else []
        for index, each in enumerate(group["params"]):
            master = held[index] if index < len(held) and not is_flat else None
            tensors = [master, *states.get(each, {}).values()]
            known = [t.shape for t in tensors if isinstance(t, StoredTensor)]
            shapes.append(max(known, key=math.prod, default=None))
        found.append(shapes)
    return found


def _names(
    param_groups: list[Any],
    shapes: list[list[Shape | None]],
    trained: Mapping[str, Shape],
) -> list[list[str]] | None:
    said = [group.get("param_names") for group in param_groups]
    if all(
        type(names) is list and len(names) == len(group)
        for names, group in zip(said, shapes, strict=True)
    ):
        return [[str(name) for name in names] for names in said]
    if len(shapes) != 1:
        return None
    first = _in_order(shapes[0], list(trained.items()))
    last = _in_order(shapes[0][::-1], list(trained.items())[::-1])
    # Where frozen ones are not the optimizer's, only one choice may fit.
    return [first] if first and first == last[::-1] else None


def _in_order(
    shapes: list[Shape | None], trained: list[tuple[str, Shape]]
) -> list[str]:
    """Return the first of the names, in order, that have these shapes."""
    rest = iter(trained)
    names = []
    for wanted in shapes:
        for name, shape in rest:
            if wanted in (None, shape):
                names.append(name)
                break
    return names if len(names) == len(shapes) else []


def _completed(
    names: list[list[str]],
    shapes: list[list[Shape | None]],
    trained: Mapping[str, Shape],
) -> list[list[Shape | None]]:
    """Return the shapes with those that the model alone tells, of frozen parameters."""
    return [
        [trained.get(n) if s is None else s for n, s in zip(group, known, strict=True)]
        for group, known in zip(names, shapes, strict=True)
    ]


def _add_group(
    found: Parameters, group: Group, states: list[Any], masters: list[Any]
) -> None:
    is_flat = len(states) == 1 and len(group) > 1
    at = 0
    for index, (name, shape) in enumerate(group):
        shape = shape or ()
        found.shapes[name] = shape
        found.scalars[name] = {}
        state = dict(states[0 if is_flat else index])
        master = masters[0 if is_flat else index] if masters else None
        for key, value in {FP32: master, **state}.items():
            if isinstance(value, StoredTensor) and value.shape:
                tensor = value.run(at, shape) if is_flat else value
                split = Split(value.dtype, [((0,) * len(tensor.shape), tensor)])
                found.arrays.setdefault(str(key), {})[name] = split
            elif value is not None:
                found.scalars[name][str(key)] = value
        at += math.prod(shape)
