"""The options of a save, with defaults from the environment, and what it returns."""

import os
from dataclasses import dataclass
from pathlib import Path

from mpickpt.parallel.waiting import resolve_timeout_s
from mpickpt.storage.ring import MAX_BLOCK_NBYTES
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
        Length of one write, in bytes; a multiple of 4096, at most 16 MiB.
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
        direct_io = self.direct_io or default_direct_io()
        striping = self.striping or os.environ.get("MPICKPT_STRIPING", "site")
        object.__setattr__(self, "direct_io", direct_io)
        object.__setattr__(self, "striping", striping)
        _require_known(direct_io)
        if striping != "site":
            raise ValueError(
                f"striping {striping!r} is not 'site', the only one of this version"
            )
        block_nbytes = self.block_nbytes
        if not isinstance(block_nbytes, int):
            raise TypeError(f"block_nbytes {block_nbytes!r} is not an int")
        if not 0 < block_nbytes <= MAX_BLOCK_NBYTES or block_nbytes % 4096:
            raise ValueError(
                f"block_nbytes {block_nbytes} is not a positive multiple of 4096 up to "
                f"{MAX_BLOCK_NBYTES}"
            )
        if self.timeout_s is not None:
            resolve_timeout_s(self.timeout_s)


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


def default_direct_io() -> str:
    """Return ``MPICKPT_DIRECT_IO``, which loads obey too, else "auto"."""
    direct_io = os.environ.get("MPICKPT_DIRECT_IO") or "auto"
    _require_known(direct_io)
    return direct_io


def _require_known(direct_io: str) -> None:
    if direct_io not in ("auto", "on", "off"):
        raise ValueError(f"direct_io {direct_io!r} is not 'auto', 'on' or 'off'")
