"""The fixed-size record in which a rank tells all others what it wrote."""

import itertools
import struct
from collections.abc import Iterator

from mpickpt.format.naming import shard_path
from mpickpt.format.records import ShardRecord
from mpickpt.storage.shard_image import ShardImage
from mpickpt.storage.stream import ShardDigest

_RECEIPT = struct.Struct("<qq32s4sqq4sq")


def dump_receipt(
    rank: int, digest: ShardDigest, image: ShardImage, numel: int
) -> bytes:
    """Return what one rank wrote; `numel` counts elements of sharded arrays."""
    return _RECEIPT.pack(
        rank,
        digest.nbytes,
        bytes.fromhex(digest.sha256),
        bytes.fromhex(digest.crc32),
        image.index_offset,
        image.index_nbytes,
        bytes.fromhex(digest.index_crc32),
        numel,
    )


def shard_records(records: list[bytes], checkpoint_id: str) -> Iterator[ShardRecord]:
    """Yield the manifest's record of each rank's shard."""
    rows = [_RECEIPT.unpack(record) for record in records]
    offsets = itertools.accumulate((row[7] for row in rows), initial=0)
    for (rank, nbytes, sha256, crc32, *index, numel), offset in zip(
        rows, offsets, strict=False
    ):
        yield ShardRecord(
            rank=rank,
            path=shard_path(rank, len(rows), checkpoint_id),
            nbytes=nbytes,
            sha256=sha256.hex(),
            crc32=crc32.hex(),
            param_shard_offset=offset,
            param_shard_numel=numel,
            index=(index[0], index[1], index[2].hex()),
        )
