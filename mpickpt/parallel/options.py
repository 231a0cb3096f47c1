"""The options of a save, with defaults from the environment, and what it returns."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mpickpt.parallel.waiting import resolve_timeout_s
from mpickpt.planning.blocks import MAX_BLOCK_NBYTES
from mpickpt.planning.striping import (
    ProgressiveStriping,
    Striping,
    parse_striping,
)

if TYPE_CHECKING:
    from mpickpt.parallel.receipts import Receipts


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a save writes.

    Parameters
    ----------
    read_back : bool
        Read every shard again before publishing and compare its digest: finds a
        file system that lies, at the price of a second pass.
    direct_io : {"auto", "on", "off"}
        Whether to go around the page cache. "auto": on local file systems. Default
        ``MPICKPT_DIRECT_IO``.
    striping : {"site", "auto", "pfl"}, Striping or ProgressiveStriping, optional
        How shards go over the servers of a Lustre file system. "site" leaves it as it
        is, and warns once where that is bad for one file per rank; "auto" goes by size
        of the shards, ranks and servers; "pfl" is more stripes as a shard grows. Set on
        the checkpoint's directory; where the site refuses, a warning says so and the
        save goes on. Default ``MPICKPT_STRIPING``, as text such as
        ``count=4,size=16MiB,pool=flash``, else "site".
    block_nbytes : int, optional
        Length of one write, in bytes; a multiple of 4096, at most 16 MiB. By default
        what suits the file system: whole stripes or blocks, 4 MiB where nothing is
        known.
    timeout_s : float
        Seconds that a wait for other ranks may last without progress. Default
        ``MPICKPT_TIMEOUT_S``, else 600; how to choose it: see Notes.

    Notes
    -----
    *What counts as progress.* Each step of the protocol has a deadline of its own,
    which begins when this rank comes to it and again with every message that arrives.
    Writing and reading are no waits: every rank tells the others that it goes on,
    every 2 s or ten times per `timeout_s`, so a shard may take hours. But a file that
    does not grow for `timeout_s` fails with `StorageError` on all ranks, and its fsync
    is such a time. In the other phases nobody hears of a rank that works alone: in
    ``state()`` and the comparing of replicated values, in the copy of an asynchronous
    save, on rank 0 in making the directory (for a manager also taking the lease, up to
    30 s) and in publishing.

    *How long.* Twice the sum of the longest time by which ranks come to a call one
    after the other, and the longest single stall: the slowest fsync that the file
    system is known for (10 to 30 s on a busy Lustre), or the copy of a rank's state if
    that takes longer. 2 * (60 + 30) = 180 s would do for most; 600 s leaves room for a
    failover of a storage server.

    *What the error costs.* It comes 0.5 to 3.5 s after the deadline, and at 10,000
    ranks up to 4 s later. A value too small gives up a job that was only slow: nothing
    is damaged, but the communicator is lost, the program has to start again, and the
    steps since the last checkpoint are done twice. A value too large keeps all ranks
    waiting after one hangs: 10,000 of them for 600 s are 1,700 core hours. Most deaths
    are seen earlier: the launcher ends the job; or, with Open MPI 5 under
    ``mpiexec --with-ft ulfm``, MPI tells, and all survivors raise within a second.

    *Messages at 10,000 ranks.* While all goes well there are collectives only: a byte
    a rank at each heartbeat, 96 bytes a rank at the agreement. When a deadline
    passes, every rank that waits sends rank 0 one message of 8 bytes, and is asked,
    answers and gets the verdict in one each: 40,000 messages that rank 0 handles in
    1 to 2 s. A roll call waits for that, 0.2 ms longer per rank.
    """

    read_back: bool = False
    direct_io: str | None = None
    striping: str | Striping | ProgressiveStriping | None = None
    block_nbytes: int | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        direct_io = self.direct_io or default_direct_io()
        asked = self.striping or os.environ.get("MPICKPT_STRIPING") or "site"
        object.__setattr__(self, "direct_io", direct_io)
        object.__setattr__(self, "striping", parse_striping(asked))
        _require_known(direct_io)
        if self.block_nbytes is not None:
            _require_block(self.block_nbytes)
        if self.timeout_s is not None:
            resolve_timeout_s(self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What a save wrote.

    Equal on all ranks but for `seconds` and `written_nbytes`, and on the disks of nodes
    `path`.

    Attributes
    ----------
    path : Path
        Directory of the checkpoint.
    step : int
        The step that was saved.
    checkpoint_id : str
        Id of this save, 32 hex digits.
    nbytes : int
        Bytes of all shards.
    written_nbytes : int
        Bytes of this rank's shard.
    seconds : dict of str to float
        Time that this rank spent in each phase.
    receipts : Receipts
        What every rank has written, in rank order.
    """

    path: Path
    step: int
    checkpoint_id: str
    nbytes: int
    written_nbytes: int
    seconds: dict[str, float]
    receipts: "Receipts" = field(repr=False, compare=False)


def default_direct_io() -> str:
    """Return ``MPICKPT_DIRECT_IO``, which loads obey too, else "auto"."""
    direct_io = os.environ.get("MPICKPT_DIRECT_IO") or "auto"
    _require_known(direct_io)
    return direct_io


def _require_block(block_nbytes: int) -> None:
    if not isinstance(block_nbytes, int):
        raise TypeError(f"block_nbytes {block_nbytes!r} is not an int")
    if not 0 < block_nbytes <= MAX_BLOCK_NBYTES or block_nbytes % 4096:
        raise ValueError(
            f"block_nbytes {block_nbytes} is not a positive multiple of 4096 up to "
            f"{MAX_BLOCK_NBYTES}"
        )


def _require_known(direct_io: str) -> None:
    if direct_io not in ("auto", "on", "off"):
        raise ValueError(f"direct_io {direct_io!r} is not 'auto', 'on' or 'off'")
