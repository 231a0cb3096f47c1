"""Says where the shards of tensor-parallel ranks lie in a parameter; pure.

Files of ZeRO tell it by `universal_checkpoint_info`: patterns of names.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mpickpt.errors import ManifestError
from mpickpt.interop.sources.plain_objects import Settings
from mpickpt.state import Shape

INFO = "universal_checkpoint_info"

_REPLICATED = "tp_replicated_parameter_patterns"
_ROWS = "parameter_with_row_parallelism_patterns"
# What has to be computed, or is interleaved.
_UNSUPPORTED = (
    "parameter_to_average_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_sub_params",
    "autotp_unsupported_parameter_patterns",
    "pipeline_replicated_parameter_patterns",
    "vocabulary_parameter_patterns",
)
_MOST_CHARACTERS = 512
# A repeated group can take a time that grows without bound.
_REPEATED_GROUP = re.compile(r"\)[*+?{]")


class TensorParallelLayout:
    """Where the part that each tensor-parallel rank has lies in a parameter.

    Parameters
    ----------
    shapes : sequence of mapping of str to tuple of int
        Shapes of the parts, for each rank.
    info : object
        `universal_checkpoint_info` of the files, or None.
    where : str
        The checkpoint, for errors.

    Raises
    ------
    ManifestError
        If there are several ranks and the files do not say how a parameter was cut,
        or the parts do not fit together.
    """

    def __init__(
        self, shapes: Sequence[Mapping[str, Shape]], info: Any, where: str
    ) -> None:
        self._where = where
        self._corners: dict[str, list[Shape | None]] = {}
        self._shapes: dict[str, Shape] = {}
        self._rules = None if len(shapes) == 1 else _Rules(info, where)
        if any(set(other) != set(shapes[0]) for other in shapes[1:]):
            raise ManifestError(
                f"{where}: its tensor-parallel ranks have parameters of other names, "
                "as a pipeline has; convert it with DeepSpeed's ds_to_universal.py"
            )
        for name in shapes[0]:
            self._place(name, [other[name] for other in shapes])

    def shape(self, name: str) -> Shape:
        """Return the shape of a whole parameter."""
        return self._shapes[name]

    def corner(self, name: str, tp: int) -> Shape | None:
        """Return the offset of a rank's part; None where another rank's is taken."""
        return self._corners[name][tp]

    def _place(self, name: str, parts: list[Shape]) -> None:
        whole = list(parts[0])
        axis = None if self._rules is None else self._rules.axis(name)
        nowhere = (0,) * len(whole)
        if axis is None:
            if any(part != parts[0] for part in parts):
                raise self._wrong(name, parts)
            self._shapes[name] = parts[0]
            self._corners[name] = [nowhere] + [None] * (len(parts) - 1)
            return
        corners: list[Shape | None] = []
        at = 0
        for part in parts:
            if len(part) <= axis or _without(part, axis) != _without(parts[0], axis):
                raise self._wrong(name, parts)
            corners.append((*nowhere[:axis], at, *nowhere[axis + 1 :]))
            at += part[axis]
        whole[axis] = at
        self._shapes[name] = tuple(whole)
        self._corners[name] = corners

    def _wrong(self, name: str, parts: list[Shape]) -> ManifestError:
        return ManifestError(
            f"{self._where}: the parts {parts} of {name!r} on tensor-parallel ranks do "
            "not fit together as the checkpoint says"
        )


class _Rules:
    def __init__(self, info: Any, where: str) -> None:
        if isinstance(info, Settings):
            info = info.attributes
        if not isinstance(info, dict):
            raise ManifestError(
                f"{where} is of several tensor-parallel ranks, and its files have no "
                f"{INFO!r}, so they do not say along which axis a parameter was cut; "
                "convert it with DeepSpeed's ds_to_universal.py, from the program that "
                "knows"
            )
        self._info = info
        self._where = where

    def axis(self, name: str) -> int | None:
        """Return the axis that a parameter was cut along, None for a replicated one."""
        for kind in _UNSUPPORTED:
            if self._matches(kind, name):
                raise ManifestError(
                    f"{self._where}: {name!r} is among {kind!r}, which are not a "
                    "concatenation of the ranks' parts; convert the checkpoint with "
                    "DeepSpeed's ds_to_universal.py and import that"
                )
        if self._matches(_REPLICATED, name):
            return None
        return 1 if self._matches(_ROWS, name) else 0

    def _matches(self, kind: str, name: str) -> bool:
        listed = self._info.get(kind)
        patterns: list[Any] = list(listed) if isinstance(listed, list | dict) else []
        for entry in list(patterns):
            if isinstance(entry, dict):
                patterns += entry.get("patterns") or []
            elif isinstance(entry, Settings):
                patterns += (entry.attributes or {}).get("patterns") or []
        texts = [pattern for pattern in patterns if isinstance(pattern, str)]
        return any(self._compiled(text).match(name) for text in texts)

    def _compiled(self, pattern: str) -> re.Pattern[str]:
        try:
            if len(pattern) > _MOST_CHARACTERS or _REPEATED_GROUP.search(pattern):
                raise re.error("too long, or with a repeated group")
            return re.compile(pattern)
        except re.error as error:
            raise ManifestError(
                f"{self._where}: {INFO} has a pattern {pattern[:80]!r}: {error}"
            ) from error


def _without(shape: Shape, axis: int) -> Shape:
    return shape[:axis] + shape[axis + 1 :]
