"""Small saved runs for the tests of the commands, and a way to call these."""

from pathlib import Path

import numpy as np

import mpickpt
from mpickpt import PerRank, Replicated, Sharded
from mpickpt.cli.main import main
from tests.ranks_as_threads import run_ranks

ROOT = Path(mpickpt.__file__).parents[1]
MATRIX = np.arange(24, dtype="f4").reshape(8, 3)


def state_of(rank, size, matrix=MATRIX):
    rows = len(matrix) // size
    return {
        "model": {
            "w": Sharded(
                matrix[rank * rows : rank * rows + rows],
                global_shape=matrix.shape,
                offset=(rank * rows, 0),
            )
        },
        "b": Replicated(np.array([1, 2], "i2")),
        "chain": PerRank(np.arange(rank + 1)),
        "lr": 0.5,
        "names": ["a"],
    }


def save(path, size=2, step=7, change=None, **options):
    def save_one(comm):
        state = state_of(comm.rank, size)
        if change is not None:
            change(state, comm.rank)
        mpickpt.save_sharded(state, path, step=step, comm=comm, **options)

    assert run_ranks(size, save_one) == [None] * size
    return path


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def flip_byte_of_shard(path, rank=0):
    shard = path / mpickpt.read_manifest(path).shards[rank].path
    content = bytearray(shard.read_bytes())
    offset = content.find(np.arange(3, dtype="f4").tobytes())
    content[offset + 4] ^= 1
    shard.write_bytes(content)
    return shard
