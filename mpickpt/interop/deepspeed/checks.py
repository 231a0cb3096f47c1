"""Finds out whether files of ZeRO are of one save and fit together; pure."""

from collections.abc import Sequence
from typing import Any

from mpickpt.errors import IncompleteCheckpointError, ManifestError
from mpickpt.interop.deepspeed.flat import padded_numel, parts_numel
from mpickpt.interop.deepspeed.pickles import FragmentAddress, mapping, sequence
from mpickpt.interop.deepspeed.shard import FP32, ZeroShard

_EQUAL = ("zero_stage", "partition_count", "ds_version", "param_alignment_paddings")


def require_alike(inner: Sequence[dict[Any, Any]], names: Sequence[str]) -> None:
    """Raise `IncompleteCheckpointError` unless all files tell the same of the save."""
    for other, name in zip(inner[1:], names[1:], strict=True):
        for key in _EQUAL:
            if other.get(key) != inner[0].get(key):
                raise IncompleteCheckpointError(
                    f"{name} has {key!r} {other.get(key)!r}, {names[0]} has "
                    f"{inner[0].get(key)!r}: they are not of one save",
                    path=name,
                )


def require_count(inner: dict[Any, Any], names: Sequence[str]) -> None:
    """Raise unless there is a file of each rank that the files tell of.

    Raises
    ------
    IncompleteCheckpointError
        If there are more or fewer.
    ManifestError
        If groups of parameters are split over numbers of ranks that differ.
    """
    said = inner.get("partition_count")
    counts = set(said) if isinstance(said, list) else {said}
    if len(counts) > 1:
        raise ManifestError(
            f"{names[0]} splits its parameter groups over {said} ranks, as a mixture "
            "of experts does; convert it with DeepSpeed's ds_to_universal.py"
        )
    if counts - {len(names), None}:
        raise IncompleteCheckpointError(
            f"{names[0]} is of {said} data-parallel ranks, and there are files of "
            f"{len(names)}: some are missing, or left from another save",
            path=names[0],
        )


def require_lengths(shard: ZeroShard, names: Sequence[str]) -> None:
    """Raise unless every vector has the elements that its rank must have."""
    for state, by_rank in shard.vectors.items():
        for dp, vectors in enumerate(by_rank):
            for group, vector in vectors.items():
                needed = _needed(shard, dp, group)
                if vector.size < needed or (shard.stage == 3 and vector.size != needed):
                    raise ManifestError(
                        f"{names[dp]}: {state!r} of group {group} has {vector.size} "
                        f"elements, and {needed} are needed for the shapes that the "
                        "model's file gives"
                    )
    if shard.stage == 3:
        needed = parts_numel(shard.shapes_by_group, shard.count)
        for name, vectors in zip(names, shard.vectors[FP32], strict=True):
            total = sum(vector.size for vector in vectors.values())
            if total != needed:
                raise ManifestError(
                    f"{name} has {total} elements of masters; param_shapes needs "
                    f"{needed}. Offloaded to NVMe, or not of this save"
                )


def _needed(shard: ZeroShard, dp: int, group: int) -> int:
    if shard.stage == 3:
        return shard.vectors[FP32][dp][group].size
    total = padded_numel(shard.shapes_by_group[group], shard.paddings[group])
    partition = shard.partitions[group]
    if partition * shard.count < total:
        return total  # more than any rank has: refused
    return max(0, min(partition, total - dp * partition))


def require_mappings(
    shard: ZeroShard, inner: Sequence[dict[Any, Any]], names: Sequence[str]
) -> None:
    """Raise unless each rank's own list of what it has is what was computed."""
    for dp, (each, where) in enumerate(zip(inner, names, strict=True)):
        said = each.get("param_slice_mappings")
        if shard.stage == 3 or said is None:
            continue
        listed = {
            (group, str(name)): (address.start, address.numel)
            for group, by_name in enumerate(sequence(said, where, "mappings"))
            for name, address in mapping(by_name, where, "mappings").items()
            if isinstance(address, FragmentAddress)
        }
        computed = {
            (f.group, f.name): (f.local_start, f.length) for f in shard.fragments(dp)
        }
        if listed != computed:
            odd = sorted(listed.items() ^ computed.items())[0][0]
            raise ManifestError(
                f"{where}: param_slice_mappings says of {odd[1]!r} (start, numel) "
                f"{listed.get(odd)}; by param_shapes it is {computed.get(odd)}"
            )
