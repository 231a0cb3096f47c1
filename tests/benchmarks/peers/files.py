"""The ways that programs save by hand: one file a rank, one file for all."""

import hashlib
import os
from itertools import product
from pathlib import Path

import h5py
import numpy as np
import torch

from mpickpt.bench.bench import Bench


def h5py_and_read_back(bench: Bench) -> None:
    """Write a file per rank, and digest it by reading it again."""
    with h5py.File(bench.own_file, "w") as file:
        for name, array in bench.arrays.items():
            file[name] = array
    sync(bench.own_file)
    with bench.own_file.open("rb") as stream:
        hashlib.file_digest(stream, "sha256")


def torch_save(bench: Bench) -> None:
    """Write a file per rank."""
    tensors = {name: torch.from_numpy(array) for name, array in bench.arrays.items()}
    with bench.own_file.open("wb") as stream:
        torch.save(tensors, stream)
        stream.flush()
        os.fsync(stream.fileno())


def gather_to_root(bench: Bench) -> None:
    """Send everything to rank 0, which writes one file."""
    comm = bench.ranks.comm
    if comm.rank:
        for array in bench.arrays.values():
            comm.Send(array.view(np.uint8), dest=0)
        return
    with h5py.File(bench.own_file, "w") as file:
        for rank, (name, array) in product(range(comm.size), bench.arrays.items()):
            received = array
            if rank:
                received = np.empty_like(array)
                comm.Recv(received.view(np.uint8), source=rank)
            file[f"{rank}/{name}"] = received
    sync(bench.own_file)


def parallel_hdf5(bench: Bench) -> None:
    """Write one file from all ranks, each its part of every dataset."""
    comm = bench.ranks.comm
    path = bench.directory / "shared.h5"
    with h5py.File(path, "w", driver="mpio", comm=comm) as file:
        for name, array in bench.arrays.items():
            dataset = file.create_dataset(
                name, (comm.size * array.size,), array.dtype, fill_time="never"
            )
            dataset[comm.rank * array.size : (comm.rank + 1) * array.size] = array
    sync(path)


def why_no_parallel_hdf5() -> str:
    """Return why one file cannot be written from many ranks here; "" if it can."""
    if h5py.get_config().mpi:
        return ""
    return "h5py was built without MPI; tests/benchmarks/peers.sh says why"


def sync(path: Path) -> None:
    """Make a file durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
