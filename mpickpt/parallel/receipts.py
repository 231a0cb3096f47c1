"""What a rank tells all others of the shard it wrote, in a record of fixed size."""

import itertools
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpickpt.format.naming import shard_path
from mpickpt.format.records import ShardRecord
from mpickpt.storage.shard_image import ShardImage
from mpickpt.storage.stream import ShardDigest

_RECEIPT = struct.Struct("<qq32s4sqq4sqdd")
# The columns that every rank looks at: 65,536 receipts are half a second to parse.
_TABLE = np.dtype(
    {
        "names": ["nbytes", "write_s"],
        "formats": ["<i8", "<f8"],
        "offsets": [8, _RECEIPT.size - 8],
        "itemsize": _RECEIPT.size,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One rank's shard, and how long it took.

    Attributes
    ----------
    rank, nbytes, sha256, crc32, index
        As in `ShardRecord`.
    numel : int
        Elements of sharded arrays in the shard.
    stage_s, write_s : float
        Seconds that the rank spent copying its state, and writing its shard.
    """

    rank: int
    nbytes: int
    sha256: str
    crc32: str
    index: tuple[int, int, str]
    numel: int
    stage_s: float
    write_s: float


def receipt_of(
    rank: int,
    digest: ShardDigest,
    image: ShardImage,
    *,
    numel: int,
    stage_s: float,
    write_s: float,
) -> Receipt:
    """Return the receipt of a shard that was written."""
    return Receipt(
        rank=rank,
        nbytes=digest.nbytes,
        sha256=digest.sha256,
        crc32=digest.crc32,
        index=(image.index_offset, image.index_nbytes, digest.index_crc32),
        numel=numel,
        stage_s=stage_s,
        write_s=write_s,
    )


def dump_receipt(receipt: Receipt) -> bytes:
    """Return the receipt as bytes, of the same length on every rank."""
    offset, nbytes, crc32 = receipt.index
    return _RECEIPT.pack(
        receipt.rank,
        receipt.nbytes,
        bytes.fromhex(receipt.sha256),
        bytes.fromhex(receipt.crc32),
        offset,
        nbytes,
        bytes.fromhex(crc32),
        receipt.numel,
        receipt.stage_s,
        receipt.write_s,
    )


class Receipts:
    """The receipts of all ranks, in rank order, each parsed only when it is asked for.

    Parameters
    ----------
    records : sequence of bytes
        What `dump_receipt` packed on each rank.
    """

    def __init__(self, records: Sequence[bytes]) -> None:
        self._records = records
        self._table = np.frombuffer(b"".join(records), _TABLE)

    def __iter__(self) -> Iterator[Receipt]:
        return map(parse_receipt, self._records)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together."""
        return int(self._table["nbytes"].sum())

    @property
    def slowest(self) -> Receipt:
        """The receipt of the rank that wrote for longest."""
        return parse_receipt(self._records[int(self._table["write_s"].argmax())])


def parse_receipt(record: bytes) -> Receipt:
    """Return the receipt that `dump_receipt` packed."""
    rank, nbytes, sha256, crc32, offset, length, index_crc32, *rest = _RECEIPT.unpack(
        record
    )
    numel, stage_s, write_s = rest
    return Receipt(
        rank=rank,
        nbytes=nbytes,
        sha256=sha256.hex(),
        crc32=crc32.hex(),
        index=(offset, length, index_crc32.hex()),
        numel=numel,
        stage_s=stage_s,
        write_s=write_s,
    )


def shard_records(
    receipts: Sequence[Receipt], checkpoint_id: str
) -> Iterator[ShardRecord]:
    """Yield the manifest's record of each rank's shard."""
    numels = (receipt.numel for receipt in receipts)
    offsets = itertools.accumulate(numels, initial=0)
    for receipt, offset in zip(receipts, offsets, strict=False):
        yield ShardRecord(
            rank=receipt.rank,
            path=shard_path(receipt.rank, len(receipts), checkpoint_id),
            nbytes=receipt.nbytes,
            sha256=receipt.sha256,
            crc32=receipt.crc32,
            param_shard_offset=offset,
            param_shard_numel=receipt.numel,
            index=receipt.index,
        )


def receipts_document(receipts: Sequence[Receipt], seconds: dict[str, float]) -> bytes:
    """Return the receipts file: how long each rank took, one a line."""
    lines = ",\n".join(
        json.dumps(
            {
                "rank": receipt.rank,
                "nbytes": receipt.nbytes,
                "stage_seconds": round(receipt.stage_s, 6),
                "write_seconds": round(receipt.write_s, 6),
            }
        )
        for receipt in receipts
    )
    phases = json.dumps({phase: round(s, 6) for phase, s in seconds.items()})
    return f'{{"root_seconds": {phases},\n"ranks": [\n{lines}\n]}}\n'.encode()
