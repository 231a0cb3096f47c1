"""Says in which lengths to write a shard, so that each write is of whole blocks; pure.

Who writes part of a block, or of a stripe, has the rest of it read or locked first, or
goes to two servers. IBM, Storage Scale, "Block size": a block is the most that one I/O
operation transfers, and what a file is made of. Aaditya HPC, "Using GPFS": best where
no two writers share a block. HPE, "Configure Striping on Lustre File Systems": so much
goes to one server before the next has its turn.
"""

from mpickpt.planning.file_systems import FileSystem
from mpickpt.planning.stripe_layout import StripeLayout

DEFAULT_BLOCK_NBYTES = 4 << 20
MAX_BLOCK_NBYTES = 16 << 20
PAGE_NBYTES = 4096

# Below it `st_blksize` is the page, or the sector, of a file system that has no blocks
# worth to be written whole.
_LEAST_UNIT = 64 << 10
# Of a shard of a few megabytes several writes should be under way at a time, and its
# ring of buffers stay in the cache.
_SMALL_SHARD_NBYTES = 16 << 20
_SMALL_BLOCK_NBYTES = 1 << 20


def usual_block_nbytes(shard_nbytes: int) -> int:
    """Return the length of one write where neither stripes nor blocks matter."""
    is_small = shard_nbytes <= _SMALL_SHARD_NBYTES
    return _SMALL_BLOCK_NBYTES if is_small else DEFAULT_BLOCK_NBYTES


def block_nbytes_for(
    file_system: FileSystem,
    stripe: StripeLayout | None,
    wished: int = DEFAULT_BLOCK_NBYTES,
) -> int:
    """Return the length of one write: whole stripes or blocks, near to what is wished.

    Parameters
    ----------
    file_system : FileSystem
        Where the shards go; its `st_blksize` counts where it is 64 KiB or more.
    stripe : StripeLayout or None
        How they are striped, if that is known.
    wished : int
        Bytes; a multiple of 4096, at most 16 MiB.

    Returns
    -------
    int
        A multiple of 4096, at most 16 MiB. If a stripe or block is longer than that,
        a whole fraction of it, so that no write goes over the end of one.
    """
    unit = _unit_of(file_system, stripe)
    if unit is None:
        return wished
    if unit > MAX_BLOCK_NBYTES:
        return _largest_fraction(unit) or wished
    up = -(-wished // unit) * unit
    return up if up <= MAX_BLOCK_NBYTES else MAX_BLOCK_NBYTES // unit * unit


def _unit_of(file_system: FileSystem, stripe: StripeLayout | None) -> int | None:
    """Return what a write should be a multiple of, or None."""
    stripe_nbytes = stripe.size if stripe is not None else None
    if stripe_nbytes is not None and stripe_nbytes % PAGE_NBYTES == 0:
        return stripe_nbytes
    block_nbytes = file_system.block_nbytes
    is_block = _LEAST_UNIT <= block_nbytes <= MAX_BLOCK_NBYTES
    return block_nbytes if is_block and block_nbytes % PAGE_NBYTES == 0 else None


def _largest_fraction(unit: int) -> int | None:
    """Return the longest write that divides a unit longer than any write."""
    least_divisor = -(-unit // MAX_BLOCK_NBYTES)
    for divisor in range(least_divisor, unit // _LEAST_UNIT + 1):
        if unit % (divisor * PAGE_NBYTES) == 0:
            return unit // divisor
    return None
