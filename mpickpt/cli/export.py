"""`mpickpt export CKPT KEY -o x.npy`: one array as a file that numpy reads."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from mpickpt.cli.output import nbytes_text, print_line
from mpickpt.cli.place_arguments import add_checkpoint_argument
from mpickpt.cli.status import WHOLE, UsageError
from mpickpt.storage.array_reader import StoredArray
from mpickpt.storage.checkpoint_reader import Checkpoint, open_checkpoint
from mpickpt.storage.npy_file import new_npy_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_checkpoint_argument(parser)
    parser.add_argument("key", metavar="KEY", help="key, as `mpickpt show` prints it")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="x.npy"
    )
    parser.add_argument(
        "--rank", metavar="N", type=int, help="the rank whose per-rank array it is"
    )
    parser.add_argument(
        "--as",
        dest="dtype",
        metavar="DTYPE",
        help="write the same bytes as elements of this dtype, uint16 for bfloat16",
    )


def run(options: argparse.Namespace) -> int:
    """Write the array, verified, under its final name only when it is whole."""
    with open_checkpoint(options.checkpoint) as checkpoint:
        try:
            source = _source(checkpoint, options.key, options.rank)
        except LookupError as error:
            raise UsageError(str(error.args[0])) from error
        dtype = _npy_dtype(source.dtype, options.dtype)
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
