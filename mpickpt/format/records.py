"""Defines the records that `manifest.json` holds; touches nothing.

The types say what one field may hold; rules that join several fields are checked by
`manifest.parse_manifest`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1
INT_MAX = 2**63 - 1
MAX_NDIM = 64  # of numpy 2
NO_DIGEST = "0" * 64

Count = Annotated[int, Meta(ge=0, le=INT_MAX)]
Positive = Annotated[int, Meta(ge=1, le=INT_MAX)]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Crc32 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}\Z")]
CheckpointId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_DATE, _TIME = "[0-9]{4}(-[0-9]{2}){2}", r"[0-9]{2}(:[0-9]{2}){2}(\.[0-9]{1,9})?"
Timestamp = Annotated[str, Meta(pattern=rf"\A{_DATE}T{_TIME}Z\Z")]
Span = tuple[Count, Positive, Crc32]
Document = dict[str, Any]


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One rank's shard.

    Attributes
    ----------
    rank : int
        Rank that wrote it.
    path : str
        Relative to the checkpoint's directory.
    nbytes : int
        Size of the file.
    sha256 : str
        Digest of the whole file, 64 hex digits.
    crc32 : str
        CRC-32 of the shard's table of block CRC-32 values, 8 hex digits.
    param_shard_offset, param_shard_numel : int
        The rank's range in the flat element space of all sharded arrays.
    index : tuple of (int, int, str)
        Offset, length and CRC-32 of the shard's index.
    """

    rank: Count
    path: str
    nbytes: Positive
    sha256: Sha256
    crc32: Crc32
    param_shard_offset: Count
    param_shard_numel: Count
    index: Span


class ArrayRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One array of the state.

    Attributes
    ----------
    key : str
        Where it stands in the state tree, as `naming.key_of` writes it.
    kind : {"sharded", "replicated", "per_rank"}
        Whose it is.
    dtype : str
        Type of the elements, as `dtypes.dtype_name` writes it.
    global_shape : tuple of int or None
        None for a per-rank array, whose shape may differ between ranks.
    """

    key: str
    kind: Literal["sharded", "replicated", "per_rank"]
    dtype: str
    global_shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_NDIM)] | None


class LayoutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The file that says which rank holds which box.

    Attributes
    ----------
    path : str
        Name in the checkpoint's directory.
    nbytes : int
        Size of the file.
    sha256 : str
        Digest of the whole file, 64 hex digits.
    payload : tuple of (int, int, str)
        Offset, length and CRC-32 of the layout in the file.
    """

    path: str
    nbytes: Positive
    sha256: Sha256
    payload: Span


class ShardManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `manifest.json` says of one checkpoint.

    Attributes
    ----------
    world_size, step : int
        Number of ranks that saved, and the step they saved.
    wall_clock_seconds : float
        Run time so far, over all restarts.
    shards : tuple of ShardRecord
        In rank order, one for each rank.
    arrays : tuple of ArrayRecord
        Each key once.
    checkpoint_id : str
        Id of the save, 32 hex digits.
    created_at : str
        UTC, "2026-01-31T12:00:00Z".
    writer : dict of str to str
        Versions of the libraries that wrote it.
    run, metrics, metadata : dict
        JSON of the run, of the metrics and of the user.
    layout : LayoutRecord or None
        None when it would have been too large.
    manifest_sha256 : str
        Digest of the file with these 64 characters zeroed; set by `dump_manifest`.
    extra : dict
        Top-level fields that this version does not know.
    """

    schema_version: int = SCHEMA_VERSION
    world_size: Positive
    step: Count
    wall_clock_seconds: Annotated[float, Meta(ge=0)]
    shards: tuple[ShardRecord, ...]
    arrays: tuple[ArrayRecord, ...]
    checkpoint_id: CheckpointId
    created_at: Timestamp
    writer: dict[str, str]
    run: Document
    metrics: Document
    metadata: Document
    layout: LayoutRecord | None = None
    manifest_sha256: Sha256 = NO_DIGEST
    extra: Document = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def id8(self) -> str:
        """The part of the id that stands in file names."""
        return self.checkpoint_id[:8]
