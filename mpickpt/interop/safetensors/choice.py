"""Chooses which arrays of a checkpoint become safetensors, and names them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np

from mpickpt.cli.status import UsageError
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.naming import key_of, parse_key
from mpickpt.format.records import ArrayRecord
from mpickpt.interop.safetensors.float_casts import is_float
from mpickpt.interop.safetensors.layout import METADATA_KEY, Tensor, safetensors_dtype
from mpickpt.interop.ties import TIED, tied_to
from mpickpt.storage.checkpoint_reader import Checkpoint

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# What holds the weights of a model; its own name is not part of theirs.
_ROOTS = ("model", "master")
_ALL_OF_A_MODEL = "model/*"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The tensors of a checkpoint that are exported.

    Attributes
    ----------
    tensors : tuple of Tensor
        As they are going to be in the files.
    keys : dict of str to str
        The key of the array that each tensor comes from, by its name.
    aliases : dict of str to str
        Further names of tensors: of each the name under which it is stored.
    n_values : int
        Plain values among what was chosen, which no tensor can hold.
    """

    tensors: tuple[Tensor, ...]
    keys: dict[str, str]
    aliases: dict[str, str]
    n_values: int

    @cached_property
    def by_key(self) -> dict[str, Tensor]:
        """The tensors by the key of the array that they come from."""
        return {self.keys[tensor.name]: tensor for tensor in self.tensors}


def choose(
    checkpoint: Checkpoint, patterns: Sequence[str], dtype: str | None
) -> Choice:
    """Choose arrays of a checkpoint by their keys.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where they are.
    patterns : sequence of str
        As "model/*"; where there are none, that, or everything where no model is.
    dtype : str, optional
        One of `DTYPES`, to which floats are cast.

    Raises
    ------
    UsageError
        If nothing fits, two would have one name, or one cannot be a tensor.
    """
    records = checkpoint.manifest.arrays
    wanted = None if dtype is None else _parsed(DTYPES[dtype], f"--dtype {dtype}")
    patterns = patterns or _default_patterns(records)
    arrays = {record.key: record for record in records}
    saved = checkpoint.keys()
    values = [key for key in saved if key not in arrays]
    ties = _ties(checkpoint, arrays, values, patterns)
    # A tensor whose own name was not chosen is stored under one that was.
    stored_as = {key: key for key in arrays if _fits_any(key, patterns)}
    for alias, target in ties.items():
        stored_as.setdefault(target, alias)
    if not stored_as:
        raise UsageError(f"no array fits {' or '.join(map(repr, patterns))}")
    names = _names([*stored_as.values(), *ties])
    return Choice(
        tensors=tuple(
            _tensor(checkpoint, names[shown], arrays[key], wanted)
            for key, shown in stored_as.items()
        ),
        keys={names[shown]: key for key, shown in stored_as.items()},
        aliases={
            names[alias]: names[stored_as[target]]
            for alias, target in ties.items()
            if stored_as[target] != alias
        },
        n_values=sum(_fits_any(key, patterns) for key in values) - len(ties),
    )


def _default_patterns(records: Iterable[ArrayRecord]) -> list[str]:
    has_model = any(_fits(record.key, _ALL_OF_A_MODEL) for record in records)
    return [_ALL_OF_A_MODEL if has_model else "*"]


def _fits_any(key: str, patterns: Sequence[str]) -> bool:
    return any(_fits(key, pattern) for pattern in patterns)


def _fits(key: str, pattern: str) -> bool:
    """Tell whether a key, or what it is below, fits a pattern, as in a load."""
    return fnmatchcase(key, pattern) or key.startswith(pattern.rstrip("/") + "/")


def _ties(
    checkpoint: Checkpoint,
    arrays: Mapping[str, ArrayRecord],
    values: Iterable[str],
    patterns: Sequence[str],
) -> dict[str, str]:
    """Return the keys of chosen names that stand for another array, and its key."""
    ties = {}
    for path in map(parse_key, values):
        alias = key_of(path[:-1])
        if path[-1:] != (TIED,) or not _fits_any(alias, patterns):
            continue
        name = tied_to(checkpoint[path[:-1]])
        if name is None:
            continue
        target = key_of((*path[:-2], name))
        if target not in arrays:
            raise UsageError(f"{alias!r} is tied to {target!r}, which is no array")
        ties[alias] = target
    return ties


def _names(keys: Sequence[str]) -> dict[str, str]:
    """Return what the tensors of keys are called in the files."""
    paths = [parse_key(key) for key in keys]
    roots = {path[0] if len(path) > 1 else None for path in paths}
    n_dropped = 1 if len(roots) == 1 and roots <= set(_ROOTS) else 0
    names: dict[str, str] = {}
    key_by_name: dict[str, str] = {}
    for key, path in zip(keys, paths, strict=True):
        names[key] = name = ".".join(map(str, path[n_dropped:]))
        other = key_by_name.setdefault(name, key)
        if other != key:
            raise UsageError(f"{other!r} and {key!r} would both be called {name!r}")
        if name == METADATA_KEY or not name.isprintable():
            raise UsageError(f"{key!r} would be called {name!r}, which may not be")
    return names


def _tensor(
    checkpoint: Checkpoint,
    name: str,
    record: ArrayRecord,
    wanted: np.dtype[Any] | None,
) -> Tensor:
    key, shape = record.key, record.global_shape
    if shape is None:
        if checkpoint.manifest.world_size > 1:
            raise UsageError(f"{key!r} is another array on each rank; leave it out")
        shape = checkpoint[parse_key(key)].shape
    dtype = _parsed(record.dtype, repr(key))
    if wanted is not None and is_float(dtype):
        dtype = wanted
    dtype = dtype.newbyteorder("<")
    if safetensors_dtype(dtype) is None:
        cast = ", or cast it with --dtype" if is_float(dtype) else ""
        raise UsageError(
            f"{key!r} is {record.dtype}, which safetensors does not have; leave it "
            f"out, with --keys{cast}"
        )
    return Tensor(name=name, dtype=dtype, shape=shape)


def _parsed(name: str, what: str) -> np.dtype[Any]:
    try:
        return parse_dtype(name)
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from error
