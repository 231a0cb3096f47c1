"""A small state of every kind of leaf, saved and loaded by ranks as threads.

Its values depend on rank and step alone, so that any process can tell whether what
was loaded is what was saved, byte for byte.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from mpickpt import PerRank, Replicated, SaveOptions, Sharded, load_sharded
from mpickpt import save_sharded as save_collectively
from mpickpt.format.naming import receipts_name
from mpickpt.storage.catalog import read_manifest
from mpickpt.storage.shard_reader import BlockCache, ShardReader
from tests.ranks_as_threads import run_ranks

Span = tuple[int, int]

TIMEOUT_S = 60.0
SMALL_BLOCKS = SaveOptions(block_nbytes=64 << 10, timeout_s=TIMEOUT_S)


def state_of(rank: int, step: int, rows: int = 1000) -> dict[str, Any]:
    """Return what a rank holds at a step; `rows` is the length of its largest block."""
    rng = np.random.default_rng([rank, step])
    replicated = np.random.default_rng(step)
    return {
        "model": {
            "w": Sharded.block(rng.standard_normal((rows, 4), dtype=np.float32)),
            "half": Sharded.block(rng.standard_normal(37).astype(np.float16)),
        },
        "scale": Replicated(replicated.standard_normal(777)),
        "own": PerRank(rng.integers(0, 2**60, size=rank + 3)),
        "step": step,
        "names": ["a", None, 2.5],
    }


def flat(tree: Any, key: str = "") -> dict[str, Any]:
    """Return every leaf of a state by key: (dtype, shape, bytes) or a plain value."""
    if isinstance(tree, Sharded | Replicated | PerRank):
        tree = tree.data
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    elif isinstance(tree, np.ndarray):
        return {key: (tree.dtype.str, tree.shape, tree.tobytes())}
    else:
        return {key: tree}
    return {k: v for name, t in items for k, v in flat(t, f"{key}/{name}").items()}


def save(path: Path, *, step: int, size: int = 4, rows: int = 1000, **options: Any):
    """Save the state on ranks as threads; raise what a rank raised."""
    for outcome in try_save(path, step=step, size=size, rows=rows, **options):
        if isinstance(outcome, BaseException):
            raise outcome


def try_save(
    path: Path, *, step: int, size: int = 4, rows: int = 1000, **options: Any
) -> list[Any]:
    """Save the state on ranks as threads; return what each returned or raised."""
    options.setdefault("options", SMALL_BLOCKS)

    def save_rank(comm: Any) -> Any:
        tree = state_of(comm.rank, step, rows)
        return save_collectively(tree, path, step=step, comm=comm, **options)

    return run_ranks(size, save_rank, TIMEOUT_S)


def try_load(path: Path, *, size: int = 4, **options: Any) -> list[Any]:
    """Load on ranks as threads; return what each returned or raised."""

    def load_rank(comm: Any) -> Any:
        return load_sharded(path, comm=comm, **options)

    return run_ranks(size, load_rank, TIMEOUT_S)


def require_loads(path: Path, *, step: int, size: int = 4, rows: int = 1000):
    """Assert that every rank gets back the bytes of its state of a step."""
    for rank, outcome in enumerate(try_load(path, size=size)):
        if isinstance(outcome, BaseException):
            raise outcome
        assert flat(outcome) == flat(state_of(rank, step, rows)), f"rank {rank}"


def files_of(path: Path) -> set[str]:
    """Return the names of all files below a directory, relative to it."""
    return {
        str(Path(folder, name).relative_to(path))
        for folder, _, names in os.walk(path)
        for name in names
    }


def files_named_by_manifest(path: Path) -> set[str]:
    """Return the names of the files that a published checkpoint consists of."""
    manifest = read_manifest(path)
    names = {"manifest.json", receipts_name(manifest.checkpoint_id)}
    names |= {shard.path for shard in manifest.shards}
    return names | ({manifest.layout.path} if manifest.layout else set())


def regions_of(path: Path, rank: int) -> dict[str, Span]:
    """Return the regions that tile a shard: arrays by key, index, table, the rest.

    What belongs to none of the others is HDF5's metadata, or padding where all is 0.
    """
    manifest = read_manifest(path)
    record = manifest.shards[rank]
    reader = ShardReader(path, record, manifest.world_size, BlockCache())
    itemsizes = {a.key: np.dtype(a.dtype).itemsize for a in reader.index.arrays}
    known = {
        f"array {array.key}": (
            part.file_offset,
            part.file_offset + part.box.size * itemsizes[array.key],
        )
        for array in reader.index.arrays
        for part in array.parts
        if part.file_offset is not None
    }
    for name, (offset, nbytes) in {
        "index": record.index[:2],
        "table": reader.index.table,
    }.items():
        known[name] = (offset, offset + nbytes)
    content = reader.path.read_bytes()
    place, found = 0, {}
    for name, (start, stop) in sorted(known.items(), key=lambda item: item[1]):
        found |= _gap(content, place, start, len(found))
        found[name] = (start, stop)
        place = stop
    return found | _gap(content, place, len(content), len(found))


def _gap(content: bytes, start: int, stop: int, number: int) -> dict[str, Span]:
    used = start + len(content[start:stop].rstrip(b"\0"))
    gaps = {f"metadata {number}": (start, used), f"padding {number}": (used, stop)}
    return {name: (low, high) for name, (low, high) in gaps.items() if low < high}


def flip_bit(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))
