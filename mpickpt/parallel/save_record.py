"""What is put on record of a save: its manifest, a line in the log, a warning."""

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from mpickpt.format.records import LayoutRecord, ShardManifest
from mpickpt.parallel.describe import Description
from mpickpt.parallel.options import SaveResult
from mpickpt.parallel.receipts import Receipt, shard_records
from mpickpt.parallel.save_call import SaveCall
from mpickpt.storage.permissions import permission_notes
from mpickpt.storage.shard_image import hdf5_version
from mpickpt.version import __version__

log = logging.getLogger(__name__)


def manifest_of(
    call: SaveCall,
    description: Description,
    receipts: Sequence[Receipt],
    checkpoint_id: str,
    layout: LayoutRecord | None,
) -> ShardManifest:
    """Return the manifest of a save whose shards are all written."""
    return ShardManifest(
        world_size=len(receipts),
        step=call.step,
        wall_clock_seconds=call.run_time_s(),
        shards=tuple(shard_records(receipts, checkpoint_id)),
        arrays=description.resolved.arrays,
        checkpoint_id=checkpoint_id,
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        writer={"mpickpt": __version__, "hdf5": hdf5_version()},
        run=dict(call.run),
        metrics=call.metrics or {},
        metadata=call.metadata or {},
        layout=layout,
    )


def manifest_of_shards(result: SaveResult) -> ShardManifest:
    """Return as much of a manifest as every rank knows: its shards, no arrays."""
    shards = tuple(shard_records(list(result.receipts), result.checkpoint_id))
    return ShardManifest(
        world_size=len(shards),
        step=result.step,
        wall_clock_seconds=0.0,
        shards=shards,
        arrays=(),
        checkpoint_id=result.checkpoint_id,
        created_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        writer={},
        run={},
        metrics={},
        metadata={},
    )


def say_saved(result: SaveResult, slowest: Receipt, place: str) -> None:
    """Log one line for a save.

    Parameters
    ----------
    result : SaveResult
        Of rank 0.
    slowest : Receipt
        Of the rank that wrote for longest.
    place : str
        What all ranks call the checkpoint's place.
    """
    seconds = sum(result.seconds.values())
    log.info(
        "step %d: saved %.3f GB in %.3f s, %.2f GB/s; %s; slowest rank %d wrote "
        "for %.3f s; %s",
        result.step,
        result.nbytes / 1e9,
        seconds,
        result.nbytes / 1e9 / max(seconds, 1e-9),
        ", ".join(f"{phase} {s:.3f} s" for phase, s in result.seconds.items()),
        slowest.rank,
        slowest.write_s,
        place,
    )


def warn_of_permissions(directory: Path, shard: Path) -> None:
    """Say if others may read the run, but not what was saved."""
    for note in permission_notes(directory.parent, (directory, shard)):
        log.warning("%s", note)
