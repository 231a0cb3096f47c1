"""Saves through `torch.distributed.checkpoint` as mpickpt does: shards and a manifest.

Knows DCP's interface and the public save.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mpickpt.errors import CallMismatchError, StateTypeError
from mpickpt.format.naming import parse_step_directory
from mpickpt.interop.dcp_storage.plan import Announced, Described, describe, draft
from mpickpt.interop.dcp_storage.tree import METADATA_KEY
from mpickpt.parallel.communicators import conversations_of, mpi_of
from mpickpt.parallel.options import SaveOptions, SaveResult
from mpickpt.parallel.save import save_sharded
from mpickpt.parallel.waiting import Steps, run

PHASE = "describe"


class DcpWriter(StorageWriter):
    """Write what `torch.distributed.checkpoint` saves as a checkpoint of mpickpt.

    Parameters
    ----------
    path : path-like
        Directory of the checkpoint; a ``checkpoint_id`` given to DCP replaces it.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks of DCP's process group; None is this process alone, without MPI.
    step : int, optional
        Step number, from 0; by default that of the path, as in "step-0000000100",
        else 0.
    options : SaveOptions, optional
        How to write.
    overwrite : bool
        Replace a published checkpoint at `path`.
    metadata, metrics : dict, optional
        JSON values for the manifest; those of rank 0 are taken.

    Attributes
    ----------
    result : SaveResult or None
        What the last save wrote.

    Notes
    -----
    Collective: every rank of `comm` makes one, uses it in the same calls, and gets the
    same errors, in DCP's ``CheckpointException``. The checkpoint is durable and whole
    when ``dcp.save`` returns, or the future of ``dcp.async_save`` is done.

    ``async_save`` saves from a thread of DCP's, so MPI must give MPI_THREAD_MULTIPLE,
    as mpi4py asks for by default; no other save of mpickpt may go on meanwhile on the
    same communicator. It cannot save from another process.

    A planner that fails on one rank only after DCP has agreed on the plans, in
    ``finish_plan``, keeps the other ranks waiting for ``options.timeout_s``.

    Examples
    --------
    >>> import torch.distributed.checkpoint as dcp  # doctest: +SKIP
    >>> writer = mpickpt.torch.DcpWriter(path, comm, step=100)  # doctest: +SKIP
    >>> dcp.save(state_dict, storage_writer=writer)  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        comm: Any = None,
        *,
        step: int | None = None,
        options: SaveOptions | None = None,
        overwrite: bool = False,
        metadata: dict[str, Any] | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if METADATA_KEY in (metadata or {}):
            raise ValueError(f"metadata has {METADATA_KEY!r}, which DcpWriter sets")
        self.path = Path(path)
        self.step = step
        self.options = SaveOptions() if options is None else options
        self.overwrite = overwrite
        self.metadata = metadata
        self.metrics = metrics
        self.result: SaveResult | None = None
        self._comm = comm
        # Here and not in a save, which may come from a thread beside the program's own
        # collectives on this communicator.
        conversations_of(comm, self.options.timeout_s)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where the checkpoint is written; DCP's word for it."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether this can be written to: a directory, and no URL."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, elsewhere if a path is given."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self.result = None

    def storage_meta(self) -> StorageMeta:
        """Return what DCP shows of this storage to the planner."""
        return StorageMeta(checkpoint_id=self.path)

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse saves that this storage cannot make."""
        if not kwargs.get("use_collectives", True):
            raise CallMismatchError(
                "use_collectives=False would give each rank a checkpoint of its own; "
                "DcpWriter writes one for all ranks, so leave it out"
            )
        require_threads(self._comm)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans as they are, if they are those of all ranks."""
        require_all_ranks(plans, self._comm, "DcpWriter")
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Save what the plans of all ranks hold; collective."""
        described = run(self._described(plan, planner))
        document = {METADATA_KEY: described.marks.document()}
        self.result = save_sharded(
            described.tree,
            self.path,
            step=self._step(),
            comm=self._comm,
            metadata={**(self.metadata or {}), **document},
            metrics=self.metrics,
            overwrite=self.overwrite,
            options=self.options,
        )
        written = [
            WriteResult(
                index=item.index,
                size_in_bytes=item.tensor_storage_size() or 0,
                storage_data=None,
            )
            for item in plan.items
        ]
        done = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete what DCP returns; the checkpoint was published by `write_data`."""
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()

    def _step(self) -> int:
        if self.step is not None:
            return self.step
        return parse_step_directory(self.path.name) or 0

    def _described(self, plan: Any, planner: Any) -> Steps[Described]:
        """Learn what all ranks write, and return this rank's tree."""
        talk = conversations_of(self._comm, self.options.timeout_s).save
        own = yield from talk.agree(lambda: draft(plan, planner), PHASE)
        gathered = yield from talk.gather(msgspec.msgpack.encode(own.announced), PHASE)
        answer = yield from talk.on_root(
            lambda: msgspec.msgpack.encode(gathered), PHASE
        )

        def described() -> Described:
            records = msgspec.msgpack.decode(answer, type=list[bytes])
            announced = (msgspec.msgpack.decode(r, type=Announced) for r in records)
            return describe(own, announced)

        return (yield from talk.agree(described, PHASE))

    def __reduce__(self) -> Any:
        raise StateTypeError(
            "DcpWriter cannot go to another process, which is no rank of the MPI "
            "program: leave async_checkpointer_type at AsyncCheckpointerType.THREAD"
        )


def require_threads(comm: Any) -> None:
    """Raise in a thread that may not call MPI."""
    if comm is None or threading.current_thread() is threading.main_thread():
        return
    mpi = mpi_of(comm)
    if comm.Get_size() > 1 and mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise CallMismatchError(
            "dcp.async_save saves from a thread, but MPI was started without "
            "MPI_THREAD_MULTIPLE; take a build of MPI that has it and do not set "
            "mpi4py.rc.thread_level or .threads, or use mpickpt.save_sharded_async, "
            "which needs no threads in MPI"
        )


def require_all_ranks(plans: Sequence[Any], comm: Any, name: str) -> None:
    """Raise unless DCP's process group has as many ranks as the communicator."""
    size = 1 if comm is None else comm.Get_size()
    if len(plans) != size:
        raise CallMismatchError(
            f"DCP's process group has {len(plans)} ranks, the communicator of {name} "
            f"has {size}; give {name} a communicator of the same ranks, for a part of "
            "them one of comm.Split(...)"
        )
