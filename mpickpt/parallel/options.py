"""The options of a save, with defaults from the environment, and what it returns."""

import os
from dataclasses import dataclass
from pathlib import Path

from mpickpt.storage.stream import DEFAULT_BLOCK_NBYTES


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
    striping : {"site"}
        Lustre striping; "site" leaves it as it is. Default ``MPICKPT_STRIPING``.
    block_nbytes : int
        Length of one write, in bytes; a multiple of 4096.
    timeout_s : float
        Seconds that a wait for other ranks may last without progress. Default
        ``MPICKPT_TIMEOUT_S``, else 600.
    """

    read_back: bool = False
    direct_io: str | None = None
    striping: str | None = None
    block_nbytes: int = DEFAULT_BLOCK_NBYTES
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        direct_io = self.direct_io or os.environ.get("MPICKPT_DIRECT_IO", "auto")
        striping = self.striping or os.environ.get("MPICKPT_STRIPING", "site")
        object.__setattr__(self, "direct_io", direct_io)
        object.__setattr__(self, "striping", striping)
        if direct_io not in ("auto", "on", "off"):
            raise ValueError(f"direct_io {direct_io!r} is not 'auto', 'on' or 'off'")
        if striping != "site":
            raise ValueError(
                f"striping {striping!r} is not 'site', the only one of this version"
            )
        if self.block_nbytes <= 0 or self.block_nbytes % 4096:
            raise ValueError(
                f"block_nbytes {self.block_nbytes} is not a positive multiple of 4096"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What a save wrote; equal on all ranks but for `seconds` and `written_nbytes`.

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
    """

    path: Path
    step: int
    checkpoint_id: str
    nbytes: int
    written_nbytes: int
    seconds: dict[str, float]
