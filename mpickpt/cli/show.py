"""`mpickpt show CKPT`: what one checkpoint holds, out of its manifest."""

import argparse
import json
import math
from typing import Any

import msgspec

from mpickpt.cli.output import (
    age_text,
    nbytes_text,
    print_json,
    print_line,
    print_table,
)
from mpickpt.cli.place_arguments import add_checkpoint_argument
from mpickpt.cli.status import WHOLE
from mpickpt.format.dtypes import parse_dtype
from mpickpt.format.records import ArrayRecord, ShardManifest
from mpickpt.storage.catalog import read_manifest
from mpickpt.storage.places import Place

_ARRAY_COLUMNS = ("array", "kind", "dtype", "shape", ">size")
_SHARD_COLUMNS = (">rank", ">size", "shard")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_checkpoint_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the manifest as a person, or a program, reads it."""
    manifest = read_manifest(options.checkpoint)
    if options.json:
        print_json(_document(options.checkpoint, manifest))
        return WHOLE
    _print_summary(options.checkpoint, manifest)
    if manifest.arrays:
        print_line()
        print_table(_ARRAY_COLUMNS, [_array_row(array) for array in manifest.arrays])
    print_line()
    rows = [[str(s.rank), nbytes_text(s.nbytes), s.path] for s in manifest.shards]
    print_table(_SHARD_COLUMNS, rows)
    for name in ("run", "metrics", "metadata"):
        _print_fields(name, getattr(manifest, name))
    return WHOLE


def array_nbytes(record: ArrayRecord) -> int | None:
    """Return the bytes of an array; None where this machine cannot tell."""
    if record.global_shape is None:
        return None
    try:
        return math.prod(record.global_shape) * parse_dtype(record.dtype).itemsize
    except ValueError:
        return None


def _document(path: Place, manifest: ShardManifest) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(manifest)
    extra = document.pop("extra")
    document |= {"path": str(path), "nbytes": manifest.nbytes}
    return dict(extra) | document


def _print_summary(path: Place, manifest: ShardManifest) -> None:
    ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}"
    writer = ", ".join(f"{name} {v}" for name, v in sorted(manifest.writer.items()))
    print_line(str(path))
    print_line(f"  step      {manifest.step}")
    print_line(f"  saved by  {ranks}, {writer}")
    print_line(
        f"  created   {manifest.created_at} ({age_text(manifest.created_at)} ago)"
    )
    print_line(f"  run time  {manifest.wall_clock_seconds:.0f} s")
    print_line(f"  size      {nbytes_text(manifest.nbytes)}")
    print_line(f"  id        {manifest.checkpoint_id}")


def _array_row(record: ArrayRecord) -> list[str]:
    shape = record.global_shape
    return [
        record.key,
        record.kind,
        record.dtype,
        "by rank" if shape is None else str(list(shape)),
        "-" if shape is None else nbytes_text(array_nbytes(record)),
    ]


def _print_fields(title: str, fields: dict[str, Any]) -> None:
    if not fields:
        return
    print_line()
    print_line(title)
    for name, value in fields.items():
        print_line(f"  {name}: {json.dumps(value, ensure_ascii=False)}")
