"""HDF5 never opens a file of a checkpoint: its locks fail on Lustre and NFS.

And it takes damaged files for its own: what it reads it must not be given unverified.
"""

import fcntl
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpickpt import (
    CheckpointManager,
    Replicated,
    Sharded,
    load_sharded,
    open_checkpoint,
    save_sharded,
)
from mpickpt.storage.verification import verify_checkpoint
from tests.states import on_ranks

SIZE = 2


@pytest.fixture
def opened(monkeypatch):
    """Paths that HDF5 was asked to open or create."""
    paths = []
    for name in ("open", "create"):
        call = getattr(h5py.h5f, name)

        def note(path, *arguments, call=call, **options):
            paths.append(Path(path.decode() if isinstance(path, bytes) else path))
            return call(path, *arguments, **options)

        monkeypatch.setattr(h5py.h5f, name, note)
    return paths


def state(comm):
    rows = Sharded(np.full((2, 3), comm.rank), (2 * comm.size, 3), (2 * comm.rank, 0))
    return {"w": rows, "scale": Replicated(np.arange(5.0))}


def test_hdf5_opens_nothing_on_the_file_system(tmp_path, opened, monkeypatch):
    locked = []
    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, lambda *arguments: locked.append(arguments))

    def save_and_load(comm):
        save_sharded(state(comm), tmp_path / "c", step=1, comm=comm)
        load_sharded(tmp_path / "c", comm=comm)
        with CheckpointManager(
            tmp_path / "run", comm, state=lambda: state(comm)
        ) as manager:
            manager.save(1)

    on_ranks(SIZE, save_and_load)
    assert verify_checkpoint(tmp_path / "c").failures == ()
    with open_checkpoint(tmp_path / "c") as checkpoint:
        checkpoint.load()

    # The images of shards are made in memory.
    assert opened
    assert not [path for path in opened if tmp_path in path.parents]
    assert locked == []
