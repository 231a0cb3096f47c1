"""Saves to the disks of nodes by ranks that are threads, and what to look for there."""

import hashlib
import os

import numpy as np

import mpickpt
from mpickpt import PerRank, Replicated, Sharded
from mpickpt.parallel.communicators import conversations_of
from mpickpt.parallel.describe import memory_of
from mpickpt.parallel.node_save import on_nodes
from mpickpt.parallel.pending import begin_save
from mpickpt.parallel.pending_save import pending_of
from mpickpt.parallel.save import save_at_once
from mpickpt.parallel.save_call import (
    SaveCall,
    conversations_of_save,
    place_and_options,
)
from mpickpt.parallel.save_steps import Save
from mpickpt.parallel.waiting import run
from mpickpt.storage.catalog import step_path

EVEN = ("a", "a", "b", "b")
UNEVEN = ("a", "a", "a", "b")
FOUR = ("a", "b", "c", "d")
ROWS = 3000


def state(comm, rows=ROWS):
    own = np.full((rows, 3), comm.rank + 0.5, "f4")
    return {
        "w": Sharded(own, (rows * comm.size, 3), (rows * comm.rank, 0)),
        "scale": Replicated(np.arange(5.0)),
        "rng": PerRank(np.arange(comm.rank + 3)),
        "lr": 1e-3,
    }


def save_on_nodes(
    tree,
    template,
    *,
    step,
    comm=None,
    copies=0,
    metadata=None,
    metrics=None,
    overwrite=False,
    options=None,
):
    """Save as a manager does whose first tier is the disk of each node."""
    directory, options, unusable = place_and_options(os.sep, options)
    talks = conversations_of_save(comm, options)
    call = SaveCall(
        state=lambda: tree,
        directory=directory,
        step=step,
        metadata=metadata,
        metrics=metrics,
        overwrite=overwrite,
        options=options,
        comm=comm,
        unusable=unusable,
    )
    call = on_nodes(call, template, copies=copies)
    earlier = pending_of(talks)
    if earlier is not None:
        earlier.finish()
    memory = memory_of(talks.memory, call.run_key)
    return run(save_at_once(Save(talks.save, memory, call)))


def save(comm, nodes, step=1, **options):
    return save_on_nodes(state(comm), nodes.template, step=step, comm=comm, **options)


def begin(comm, template, step=1, *, copies=0, progress="poll"):
    call = SaveCall(
        state=lambda: state(comm),
        directory=None,
        step=step,
        metadata=None,
        metrics=None,
        overwrite=False,
        options=mpickpt.SaveOptions(),
        comm=comm,
    )
    call = on_nodes(call, template, copies=copies)
    talks = conversations_of(comm)
    return begin_save(talks, call, progress=progress, on_busy="wait")


def files_on(nodes, names, step=1):
    """Return for each node the names of files that lie in the directory of a step."""
    return {
        name: sorted(p.name for p in step_path(nodes.run_on(name), step).iterdir())
        for name in names
    }


def ranks_in(names):
    return [int(name[4:9]) for name in names if name.startswith("rank")]


def anything_in(folder):
    return [str(path) for path in folder.rglob("*") if path.is_file()]


def require_whole_without(nodes, lost, names, step=1):
    """Assert that the disks but those lost hold every shard and its saved bytes."""
    left = [step_path(nodes.run_on(name), step) for name in names if name not in lost]
    manifests = {mpickpt.read_manifest(directory).checkpoint_id for directory in left}
    manifest = mpickpt.read_manifest(left[0])
    assert len(manifests) == 1
    for record in [*manifest.shards, manifest.layout]:
        copies = [d / record.path for d in left if (d / record.path).exists()]
        assert copies, f"{record.path} is lost with {lost}"
        for path in copies:
            content = path.read_bytes()
            assert hashlib.sha256(content).hexdigest() == record.sha256
