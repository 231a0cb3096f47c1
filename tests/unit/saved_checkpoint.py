"""A checkpoint of four ranks with a bit of everything, and ways to spoil it."""

import json
from dataclasses import dataclass

import msgspec
import numpy as np

import mpickpt
from mpickpt import (
    PerRank,
    Replicated,
    Sharded,
)
from mpickpt.format.digest import crc32, crc32_hex, shard_blocks
from mpickpt.format.manifest import dump_manifest
from mpickpt.format.naming import MANIFEST_NAME
from tests.ranks_as_threads import run_ranks

ROWS = np.arange(40 * 28, dtype="f4").reshape(40, 28)
COLUMNS = np.arange(40 * 28, dtype=">i8").reshape(40, 28)
SHARED = np.arange(1200.0).reshape(30, 40)
SIZE = 4


@dataclass
class Options:
    depth: int
    name: str


def state_of(rank):
    return {
        "model": {
            "rows": Sharded(
                ROWS[rank * 10 : rank * 10 + 10],
                global_shape=ROWS.shape,
                offset=(rank * 10, 0),
            ),
            "columns": Sharded(
                np.asfortranarray(COLUMNS[:, rank * 7 : rank * 7 + 7]),
                global_shape=COLUMNS.shape,
                offset=(0, rank * 7),
            ),
        },
        "shared": Replicated(SHARED),
        "adam": Sharded.block(np.full(rank, rank, "f8")),
        "pieces": Sharded.pieces(
            [((rank * 2,), np.full(2, rank)), ((8 + rank,), np.full(1, rank))],
            global_shape=(12,),
        ),
        "empty": Replicated(np.empty((0, 3))),
        "scalar": Replicated(np.array(2.5)),
        "rng": PerRank(np.random.default_rng(rank)),
        "bare_rng": np.random.RandomState(rank),
        "chain": PerRank(np.arange(rank)),
        "lr": 0.1,
        "names": ["a", None, {"deep": (1, 2)}],
        "options": Options(3, "x"),
        "loss": rank / 2,
        f"stage{rank}": {"w": Replicated(np.full(3, rank)), "depth": rank},
        "a/b": {"1": "text", 1: "int", "": "empty"},
    }


def save(path, size=SIZE, state=state_of, **options):
    results = run_ranks(
        size,
        lambda comm: mpickpt.save_sharded(
            state(comm.rank), path, step=7, comm=comm, **options
        ),
    )
    failures = [result for result in results if isinstance(result, BaseException)]
    assert not failures


def change_manifest(path, **changes):
    """Publish a manifest with other fields, and a digest that fits them."""
    manifest = msgspec.structs.replace(mpickpt.read_manifest(path), **changes)
    (path / MANIFEST_NAME).write_bytes(dump_manifest(manifest))


def forge_index(path, rank, change):
    """Change the index of a shard, with every digest made to fit, as an enemy would."""
    manifest = mpickpt.read_manifest(path)
    record = manifest.shards[rank]
    content = bytearray((path / record.path).read_bytes())
    offset, nbytes, _ = record.index
    document = json.loads(content[offset : offset + nbytes])
    change(document)
    text = json.dumps(document).encode().ljust(nbytes)
    assert len(text) == nbytes
    content[offset : offset + nbytes] = text
    start, length = document["table"]
    crcs = [crc32(content[a:b]) for a, b in shard_blocks(start, length, len(content))]
    table = np.array(crcs, "<u4").tobytes()
    content[start : start + length] = table[:length]
    (path / record.path).write_bytes(content)
    forged = msgspec.structs.replace(
        record,
        index=(offset, nbytes, crc32_hex(crc32(text))),
        crc32=crc32_hex(crc32(table)),
    )
    shards = (*manifest.shards[:rank], forged, *manifest.shards[rank + 1 :])
    change_manifest(path, shards=shards, layout=None)


def entry(document, key):
    return next(array for array in document["arrays"] if array["key"] == key)
