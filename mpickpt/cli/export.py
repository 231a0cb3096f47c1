"""`mpickpt export CKPT ...`: arrays as files that others read, .npy or safetensors."""

import argparse
from importlib import import_module
from typing import Any

import numpy as np

from mpickpt.cli.output import nbytes_text, print_line
from mpickpt.cli.place_arguments import (
    add_checkpoint_argument,
    argument,
    local_place,
)
from mpickpt.cli.status import WHOLE, UsageError
from mpickpt.planning.units import parse_nbytes
from mpickpt.storage.array_reader import StoredArray
from mpickpt.storage.checkpoint_reader import Checkpoint, open_checkpoint
from mpickpt.storage.npy_file import new_npy_file

_SPELLED = {
    "rank": "--rank",
    "dtype_of_bytes": "--as",
    "keys": "--keys",
    "dtype": "--dtype",
    "max_shard": "--max-shard",
    "overwrite": "--overwrite",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = (
        "Write one array as a .npy file, or many as the safetensors files that loaders "
        "of models read: model.safetensors, or parts of it with an index. What is "
        "written is verified, synced, and has its name only when it is whole."
    )
    add_checkpoint_argument(parser)
    key = parser.add_argument(
        "key",
        metavar="KEY",
        help="key, as `mpickpt show` prints it; for safetensors a pattern, or none",
    )
    # By nargs="?" it could not stand after an option any more.
    key.required = False
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=local_place("write to a directory"),
        required=True,
        help="x.npy; for safetensors a directory",
    )
    parser.add_argument("--format", choices=["npy", "safetensors"], default="npy")
    _add_npy_arguments(parser.add_argument_group("npy"))
    _add_safetensors_arguments(parser.add_argument_group("safetensors"))


def _add_npy_arguments(group: Any) -> None:
    group.add_argument(
        "--rank", metavar="N", type=int, help="the rank whose per-rank array it is"
    )
    group.add_argument(
        "--as",
        dest="dtype_of_bytes",
        metavar="DTYPE",
        help="write the same bytes as elements of this dtype, uint16 for bfloat16",
    )


def _add_safetensors_arguments(group: Any) -> None:
    group.add_argument(
        "--keys",
        metavar="PATTERN",
        action="append",
        help="which arrays; may be repeated; by default 'model/*' (whose names begin "
        "after it), or all where there are none of these",
    )
    group.add_argument(
        "--dtype",
        choices=["bf16", "fp16", "fp32"],
        help="cast floats, each rounded to the nearest, ties to even",
    )
    group.add_argument(
        "--max-shard",
        metavar="SIZE",
        type=argument(parse_nbytes),
        help="most bytes of tensors in one file, by default 5GB",
    )
    group.add_argument(
        "--overwrite", action="store_true", help="replace the model in the directory"
    )


def run(options: argparse.Namespace) -> int:
    """Write what was asked for, verified, under its final name when it is whole.

    Raises
    ------
    UsageError
        If an option belongs to the other format, or there is no such array.
    """
    of_npy = ("rank", "dtype_of_bytes")
    of_safetensors = ("keys", "dtype", "max_shard", "overwrite")
    foreign = of_safetensors if options.format == "npy" else of_npy
    for name in foreign:
        given = getattr(options, name)
        if given is not None and given is not False:
            raise UsageError(f"{_SPELLED[name]} is not for --format {options.format}")
    if options.format == "npy":
        if options.key is None:
            raise UsageError("which array? give its KEY, as `mpickpt show` prints it")
        return _export_npy(options)
    # What knows other formats is a room above this one.
    home = import_module("mpickpt.interop.safetensors.export")
    status: int = home.run(options)
    return status


def _export_npy(options: argparse.Namespace) -> int:
    with open_checkpoint(options.checkpoint) as checkpoint:
        try:
            source = _source(checkpoint, options.key, options.rank)
        except LookupError as error:
            raise UsageError(str(error.args[0])) from error
        dtype = _npy_dtype(source.dtype, options.dtype_of_bytes)
        shape = tuple(source.shape)
        # What no shard holds is refused before the disk is filled for it.
        elements = None
        if (
            isinstance(source, StoredArray)
            and source.kind != "per_rank"
            and source.size
        ):
            checkpoint.stored_boxes(options.key)
        else:
            elements = source[...]
        with new_npy_file(options.output, dtype, shape) as target:
            out = target.view(source.dtype)
            if elements is None:
                checkpoint.read_into(options.key, out)
            else:
                out[...] = elements
    size = nbytes_text(source.nbytes)
    print_line(f"{options.output}: {dtype} {list(shape)}, {size}")
    return WHOLE


def _source(checkpoint: Checkpoint, key: str, rank: int | None) -> Any:
    source = checkpoint[key] if rank is None else checkpoint.per_rank(key)[rank]
    if not isinstance(source, StoredArray | np.ndarray):
        raise UsageError(f"{key!r} is no array but a {type(source).__name__}")
    return source


def _npy_dtype(dtype: np.dtype[Any], wanted: str | None) -> np.dtype[Any]:
    if wanted is None:
        if dtype.isbuiltin == 2:  # a type that numpy learns from another package
            raise UsageError(
                f"a .npy file cannot hold {dtype}; write its bytes with "
                f"--as uint{8 * dtype.itemsize}"
            )
        return dtype
    try:
        other = np.dtype(wanted)
    except TypeError as error:
        raise UsageError(f"--as {wanted}: {error}") from error
    if other.itemsize != dtype.itemsize or other.hasobject:
        raise UsageError(
            f"--as {wanted}: {dtype} has {dtype.itemsize} bytes an element, "
            f"{wanted} has {other.itemsize}"
        )
    return other
