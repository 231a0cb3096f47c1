"""Runs with small checkpoints, for the tests of what is done to a run."""

import numpy as np

import mpickpt


def save(run_dir, *steps, **options):
    for step in steps:
        mpickpt.save_sharded(
            {"x": np.arange(step % 100 + 1)},
            mpickpt.step_path(run_dir, step),
            step=step,
            **options,
        )


def published(run_dir):
    return [entry.step for entry in mpickpt.checkpoints(run_dir)]


def truncate_shard(run_dir, step):
    path = mpickpt.step_path(run_dir, step)
    shard = path / mpickpt.read_manifest(path).shards[0].path
    shard.write_bytes(shard.read_bytes()[:-1])
    return shard


def files_below(directory):
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*"))
