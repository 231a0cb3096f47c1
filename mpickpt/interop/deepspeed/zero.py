"""Reads what the files of ZeRO stages 1, 2 and 3 say; pure: values in, records out."""

from collections.abc import Sequence
from typing import Any

from mpickpt.errors import IncompleteCheckpointError, ManifestError
from mpickpt.interop.deepspeed.checks import (
    require_alike,
    require_count,
    require_lengths,
    require_mappings,
)
from mpickpt.interop.deepspeed.flat import padded_numel
from mpickpt.interop.deepspeed.pickles import mapping, sequence, shape_of
from mpickpt.interop.deepspeed.shard import FP32, Vectors, ZeroShard
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.state import Shape

_FLAT3 = "fp32_flat_groups"
_FLAT12 = "single_partition_of_fp32_groups"
_BASE = "base_optimizer_state"
_OPTIM = "optimizer_state_dict"
_GROUPS = "param_groups"

Content = tuple[str, dict[Any, Any]]


def parse_shapes(model: dict[Any, Any], where: str) -> tuple[dict[str, Shape], ...]:
    """Return the parameters of each vector, in its order, from a model's file."""
    return tuple(
        {
            str(name): shape_of(shape, where, str(name))
            for name, shape in mapping(shapes, where, "param_shapes").items()
        }
        for shapes in sequence(model.get("param_shapes"), where, "param_shapes")
    )


def parse_shard(
    shapes: tuple[dict[str, Shape], ...], optims: Sequence[Content]
) -> ZeroShard:
    """Return what the optimizer's files of one tensor-parallel rank say.

    Parameters
    ----------
    shapes : tuple of dict of str to tuple of int
        Of the parameters, by group.
    optims : sequence of (str, dict)
        Name and content of each file, by data-parallel rank.

    Raises
    ------
    IncompleteCheckpointError
        If they are not all files of one save.
    ManifestError
        If they do not fit together, or are of a kind that is not imported.
    """
    inner = [_inner(content, where) for where, content in optims]
    names = [where for where, _ in optims]
    require_alike(inner, names)
    is_stage3 = _FLAT3 in inner[0]
    if "ds_zero_partition_groups" in inner[0]:
        raise ManifestError(
            f"{names[0]} is of experts that are split in a way of their own (AutoEP), "
            "which is not imported; convert it with DeepSpeed's ds_to_universal.py"
        )
    require_count(inner[0], names)
    states = [
        states_of(_base(each), where, len(shapes))
        for each, where in zip(inner, names, strict=True)
    ]
    fp32 = [
        _vectors(each.get(_FLAT3 if is_stage3 else _FLAT12), where, len(shapes))
        for each, where in zip(inner, names, strict=True)
    ]
    vectors, scalars, left_out = _sorted_states(states, fp32, names)
    vectors = {FP32: fp32, **vectors}
    paddings = () if is_stage3 else _paddings(inner[0], shapes, names[0])
    shard = ZeroShard(
        stage=3 if is_stage3 else 2,
        count=len(optims),
        shapes_by_group=shapes,
        vectors=vectors,
        scalars=scalars,
        groups=_groups(_base(inner[0]), shapes, names[0]),
        partitions=() if is_stage3 else _partitions(vectors, inner, shapes, paddings),
        paddings=paddings,
        left_out=left_out,
    )
    require_lengths(shard, names)
    if not _is_reordered(optims[0][1]):
        require_mappings(shard, inner, names)
    return shard


def _is_reordered(content: dict[Any, Any]) -> bool:
    """Tell whether DeepSpeed lists other places than those it puts parameters in."""
    config = content.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))


def _inner(content: dict[Any, Any], where: str) -> dict[Any, Any]:
    inner = mapping(content.get(_OPTIM), where, _OPTIM)
    if _FLAT3 not in inner and _FLAT12 not in inner:
        raise ManifestError(
            f"{where} has neither {_FLAT12!r} nor {_FLAT3!r}: not an optimizer of ZeRO"
        )
    version = content.get("ds_version")
    return {"ds_version": version, **inner} if version else inner


def _base(inner: dict[Any, Any]) -> Any:
    return inner.get(_OPTIM if _FLAT3 in inner else _BASE)


def states_of(base: Any, where: str, count: int) -> list[dict[Any, Any]]:
    """Return the states of each vector, as the optimizer has them.

    Parameters
    ----------
    base : object
        The state of the optimizer itself.
    where : str
        The file, for errors.
    count : int
        Number of vectors.
    """
    if isinstance(base, list):  # "elastic": of each group, without padding
        return [mapping(state, where, _BASE) for state in base]
    base = mapping(base, where, _BASE)
    by_id = mapping(base.get("state"), where, "state")
    ids = [
        number
        for group in sequence(base.get("param_groups"), where, _GROUPS)
        for number in sequence(mapping(group, where, _GROUPS).get("params"), where, "")
    ]
    if len(ids) != count:
        raise ManifestError(
            f"{where} has an optimizer of {len(ids)} vectors; param_shapes has {count}"
        )
    return [mapping(by_id.get(number, {}), where, "state") for number in ids]


def _vectors(value: Any, where: str, count: int) -> Vectors:
    tensors = sequence(value, where, "fp32 groups")
    if len(tensors) != count or not all(_is_vector(tensor) for tensor in tensors):
        raise ManifestError(
            f"{where} has {len(tensors)} vectors of masters, or other tensors; "
            f"param_shapes has {count}"
        )
    return dict(enumerate(tensors))


def _is_vector(value: Any) -> bool:
    is_flat = isinstance(value, StoredTensor) and len(value.shape) == 1
    return is_flat and value.is_contiguous


def _sorted_states(
    states: Sequence[list[dict[Any, Any]]],
    fp32: Sequence[Vectors],
    names: Sequence[str],
) -> tuple[dict[str, list[Vectors]], list[dict[str, Any]], list[str]]:
    """Return vectors by state, rank and group; scalars by group; and what is neither.

    Scalars are equal on all ranks, or the files are not of one save.
    """
    vectors: dict[str, list[Vectors]] = {}
    scalars: list[dict[str, Any]] = [{} for _ in states[0]]
    left_out: set[str] = set()
    for dp, (groups, name) in enumerate(zip(states, names, strict=True)):
        for group, state in enumerate(groups):
            if list(state) != list(states[0][group]):
                raise IncompleteCheckpointError(
                    f"{name} has the states {list(state)} of group {group}, {names[0]} "
                    f"has {list(states[0][group])}: they are not of one save",
                    path=name,
                )
            for key, value in state.items():
                first = states[0][group][key]
                if _is_vector(first) and first.size >= fp32[0][group].size:
                    by_rank = vectors.setdefault(str(key), [{} for _ in states])
                    by_rank[dp][group] = _require_vector(value, key, name)
                elif isinstance(first, StoredTensor) and first.shape:
                    left_out.add(f"optimizer state {key!r} of shape {first.shape}")
                else:
                    scalars[group][str(key)] = first
                    _require_equal(key, first, value, names[0], name)
    return vectors, scalars, sorted(left_out)


def _require_vector(value: Any, key: Any, where: str) -> StoredTensor:
    if isinstance(value, StoredTensor) and _is_vector(value):
        return value
    raise ManifestError(f"{where} has a state {key!r} that is no vector")


def _require_equal(key: Any, first: Any, other: Any, where: str, name: str) -> None:
    shown = [
        value.small() if isinstance(value, StoredTensor) else value
        for value in (first, other)
    ]
    if repr(shown[0]) != repr(shown[1]):
        raise IncompleteCheckpointError(
            f"{name} has {key!r} {shown[1]}, {where} has {shown[0]}: they are not of "
            "one save",
            path=name,
        )


def _paddings(
    inner: dict[Any, Any], shapes: tuple[dict[str, Shape], ...], where: str
) -> tuple[list[int], ...]:
    said = inner.get("param_alignment_paddings")
    if said is None:
        return tuple([0] * len(group) for group in shapes)
    paddings = tuple(
        sequence(each, where, "param_alignment_paddings")
        for each in sequence(said, where, "param_alignment_paddings")
    )
    fits = [len(group) for group in shapes] == [len(each) for each in paddings]
    if not fits or not all(type(n) is int and n >= 0 for p in paddings for n in p):
        raise ManifestError(
            f"{where}: param_alignment_paddings do not fit param_shapes"
        )
    return paddings


def _partitions(
    vectors: dict[str, list[Vectors]],
    inner: Sequence[dict[Any, Any]],
    shapes: tuple[dict[str, Shape], ...],
    paddings: tuple[list[int], ...],
) -> tuple[int, ...]:
    """Return how many elements each rank has of the vector of each group.

    Masters are mostly stored without the padding at the end, moments with it; the
    optimizer for bfloat16 stores both with it.
    """
    found = []
    for group in range(len(shapes)):
        lengths = [
            rank[group].size
            for by_rank in vectors.values()
            for rank in by_rank
            if group in rank
        ]
        count, total = len(inner), padded_numel(shapes[group], paddings[group])
        # All ranks have as much, and the vector is padded to a multiple of 2 * count.
        exact = -(-total // (2 * count)) * 2
        plain = -(-total // count)
        longest = max(lengths, default=0)
        found.append(exact if longest in (exact, 0) or longest < plain else longest)
    return tuple(found)


def groups_of(
    said: Sequence[Any], shapes: Sequence[dict[str, Shape]], where: str
) -> list[tuple[dict[Any, Any], list[str]]]:
    """Return settings of each parameter group, and the names of its parameters.

    Parameters
    ----------
    said : sequence of dict
        The optimizer's groups; their parameters are the vectors.
    shapes : sequence of dict of str to tuple of int
        Parameters of each vector.
    where : str
        The file, for errors.
    """
    position, groups = 0, []
    for each in said:
        group = mapping(each, where, _GROUPS)
        count = len(sequence(group.get("params"), where, "params"))
        names = [n for part in shapes[position : position + count] for n in part]
        position += count
        settings = {
            k: v for k, v in group.items() if k not in ("params", "param_names")
        }
        groups.append((settings, names))
    return groups


def _groups(
    base: Any, shapes: Sequence[dict[str, Shape]], where: str
) -> list[tuple[dict[Any, Any], list[str]]]:
    if isinstance(base, list):
        return [({}, list(group)) for group in shapes]
    said = sequence(mapping(base, where, _BASE).get(_GROUPS), where, _GROUPS)
    return groups_of(said, shapes, where)
