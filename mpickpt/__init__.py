"""Checkpoints for MPI programs on parallel file systems.

Names are imported when they are first used: importing the package imports neither
mpi4py nor h5py, because imports by many ranks hammer a shared file system.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpickpt.version import __version__ as __version__

if TYPE_CHECKING:
    from mpickpt.errors import (
        CallMismatchError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        CollectiveTimeoutError,
        CorruptShardError,
        IncompleteCheckpointError,
        LayoutError,
        LeaseHeldError,
        ManifestError,
        ReplicaMismatchError,
        StateTypeError,
        StorageError,
        WorldSizeMismatchError,
    )
    from mpickpt.format.records import ArrayRecord, ShardManifest, ShardRecord
    from mpickpt.parallel.load import load_sharded
    from mpickpt.parallel.manager import CheckpointManager
    from mpickpt.parallel.options import SaveOptions, SaveResult
    from mpickpt.parallel.pending import save_sharded_async
    from mpickpt.parallel.pending_save import PendingSave
    from mpickpt.parallel.preemption import Preemption
    from mpickpt.parallel.restore import Restored
    from mpickpt.parallel.save import save_sharded
    from mpickpt.planning.interval import EveryMinutes, EverySteps, YoungDaly
    from mpickpt.planning.keep_rules import KeepBest, KeepEvery, KeepLast
    from mpickpt.planning.stripe_layout import StripeComponent
    from mpickpt.planning.striping_wish import ProgressiveStriping, Striping
    from mpickpt.planning.tiers import DirectoryTier, LocalTier, ObjectTier
    from mpickpt.state import AsSaved, PerRank, Replicated, Sharded, StreamedArray
    from mpickpt.storage.catalog import checkpoints, latest, read_manifest, step_path
    from mpickpt.storage.checkpoint_reader import open_checkpoint
    from mpickpt.storage.run_directory import set_metrics

_HOMES = {
    "mpickpt.errors": (
        "CallMismatchError",
        "CheckpointError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "CollectiveTimeoutError",
        "CorruptShardError",
        "IncompleteCheckpointError",
        "LayoutError",
        "LeaseHeldError",
        "ManifestError",
        "ReplicaMismatchError",
        "StateTypeError",
        "StorageError",
        "WorldSizeMismatchError",
    ),
    "mpickpt.format.records": ("ArrayRecord", "ShardManifest", "ShardRecord"),
    "mpickpt.parallel.load": ("load_sharded",),
    "mpickpt.parallel.manager": ("CheckpointManager",),
    "mpickpt.parallel.options": ("SaveOptions", "SaveResult"),
    "mpickpt.parallel.pending": ("save_sharded_async",),
    "mpickpt.parallel.pending_save": ("PendingSave",),
    "mpickpt.parallel.preemption": ("Preemption",),
    "mpickpt.parallel.restore": ("Restored",),
    "mpickpt.parallel.save": ("save_sharded",),
    "mpickpt.planning.interval": ("EveryMinutes", "EverySteps", "YoungDaly"),
    "mpickpt.planning.keep_rules": ("KeepBest", "KeepEvery", "KeepLast"),
    "mpickpt.planning.stripe_layout": ("StripeComponent",),
    "mpickpt.planning.striping_wish": ("ProgressiveStriping", "Striping"),
    "mpickpt.planning.tiers": ("DirectoryTier", "LocalTier", "ObjectTier"),
    "mpickpt.state": ("AsSaved", "PerRank", "Replicated", "Sharded", "StreamedArray"),
    "mpickpt.storage.catalog": ("checkpoints", "latest", "read_manifest", "step_path"),
    "mpickpt.storage.checkpoint_reader": ("open_checkpoint",),
    "mpickpt.storage.run_directory": ("set_metrics",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ArrayRecord",
    "AsSaved",
    "CallMismatchError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CollectiveTimeoutError",
    "CorruptShardError",
    "DirectoryTier",
    "EveryMinutes",
    "EverySteps",
    "IncompleteCheckpointError",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "LayoutError",
    "LeaseHeldError",
    "LocalTier",
    "ManifestError",
    "ObjectTier",
    "PendingSave",
    "PerRank",
    "Preemption",
    "ProgressiveStriping",
    "ReplicaMismatchError",
    "Replicated",
    "Restored",
    "SaveOptions",
    "SaveResult",
    "ShardManifest",
    "ShardRecord",
    "Sharded",
    "StateTypeError",
    "StorageError",
    "StreamedArray",
    "StripeComponent",
    "Striping",
    "WorldSizeMismatchError",
    "YoungDaly",
    "checkpoints",
    "latest",
    "load_sharded",
    "open_checkpoint",
    "read_manifest",
    "save_sharded",
    "save_sharded_async",
    "set_metrics",
    "step_path",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'mpickpt' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
