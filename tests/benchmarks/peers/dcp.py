"""PyTorch Distributed Checkpoint, in the ways that its documentation shows."""

import socket
import warnings
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpointing
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from mpickpt.bench.bench import Bench
from mpickpt.bench.many_arrays import many_arrays
from mpickpt.bench.ranks import Ranks
from mpickpt.bench.rounds import Way

THREADS = (1, 2)


class Dcp:
    """Saves and loads the state of the bench; it joins the ranks by gloo.

    Every rank's tensors have names of their own: DCP then has nothing to compare, and
    each rank writes its own bytes.
    """

    LOAD: ClassVar[str] = "PyTorch DCP load, not verified"

    def __init__(self, bench: Bench, *, many: bool = False) -> None:
        join(bench.ranks)
        arrays = bench.arrays
        if many:
            arrays = {name: leaf.data for name, leaf in many_arrays(bench).items()}
        self.path = bench.directory / "dcp"
        self.tensors = {
            f"{bench.ranks.rank}.{name}": torch.from_numpy(array)
            for name, array in arrays.items()
        }
        # Kept from save to save, so that what it staged is memory to be used again;
        # pinned memory and streams are for accelerators.
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self, thread_count: int = 1) -> None:
        writer = FileSystemWriter(self.path, sync_files=True, thread_count=thread_count)
        with _without_warnings():
            checkpointing.save(dict(self.tensors), storage_writer=writer)

    def saves(self) -> dict[str, Way]:
        return {
            f"PyTorch DCP, sync_files, {count} thread{'s' * (count > 1)}": (
                lambda count=count: self.save(count)
            )
            for count in THREADS
        }

    def load(self) -> None:
        with _without_warnings():
            checkpointing.load(
                dict(self.tensors), storage_reader=FileSystemReader(self.path)
            )

    def begins(self) -> dict[str, Any]:
        return {
            "async_save of DCP": self._begin,
            "async_save of DCP, stager kept": lambda: self._begin(self.stager),
        }

    def _begin(self, stager: DefaultStager | None = None) -> Any:
        writer = FileSystemWriter(self.path, sync_files=True)
        with _without_warnings():
            return checkpointing.async_save(
                dict(self.tensors), storage_writer=writer, async_stager=stager
            )


def join(ranks: Ranks) -> None:
    """Make torch's process group of the same ranks, all on this machine."""
    if dist.is_initialized():
        return
    address = ranks.from_root(_free_address)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        rank=ranks.rank,
        world_size=ranks.size,
    )


def _free_address() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{server.getsockname()[1]}"


def _without_warnings() -> Any:
    return warnings.catch_warnings(action="ignore")
