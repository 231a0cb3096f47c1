"""Says on which levels of storage the checkpoints of a run lie; records only."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mpickpt.planning.keep_rules import KeepPolicy, parse_keep
from mpickpt.planning.units import parse_rate


@dataclass(frozen=True, slots=True)
class LocalTier:
    """The disk of each node: fast, and gone with the node.

    Parameters
    ----------
    path : path-like
        The run directory on each node's disk. "~", "$VAR" and "{node}", the node's
        name, are filled in on each rank.
    keep : int, KeepPolicy or None
        Which checkpoints stay there; an int means the last n.
    copies : {0, 1}
        1 keeps each shard also on the disk of another node, so that any one node may
        be lost.
    """

    path: str | os.PathLike[str]
    keep: KeepPolicy | int | None = field(default=2, kw_only=True)
    copies: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _check(self.path, self.keep)
        if self.copies not in (0, 1):
            raise ValueError(f"copies is {self.copies!r}; expected 0 or 1")


@dataclass(frozen=True, slots=True)
class DirectoryTier:
    """A directory on a file system that all nodes see.

    Parameters
    ----------
    path : path-like
        The run directory. "~" and "$VAR" are filled in.
    keep : int, KeepPolicy or None
        Which checkpoints stay there; None keeps all.
    every : int
        Of how many checkpoints of the first tier one comes here.
    bandwidth : str, float or None
        Bytes a second of each rank at most, "500MB/s"; None is no limit.
    """

    path: str | os.PathLike[str]
    keep: KeepPolicy | int | None = field(default=None, kw_only=True)
    every: int = field(default=1, kw_only=True)
    bandwidth: str | float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check(self.path, self.keep)
        _check_shared(self.path)
        _check_pace(self.every, self.bandwidth)


@dataclass(frozen=True, slots=True)
class ObjectTier:
    """An object store: "s3://bucket/run", "gs://bucket/run", or what fsspec knows.

    Parameters
    ----------
    url : str
        Of the run.
    keep, every, bandwidth
        As in `DirectoryTier`.
    """

    url: str
    keep: KeepPolicy | int | None = field(default=None, kw_only=True)
    every: int = field(default=1, kw_only=True)
    bandwidth: str | float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check(self.url, self.keep)
        _check_shared(self.url)
        scheme, separator, rest = self.url.partition("://")
        if not separator or not rest.strip("/"):
            raise ValueError(f"url is {self.url!r}; expected one as s3://bucket/run")
        if scheme == "memory":
            raise ValueError(
                f"url is {self.url!r}, the memory of one process; expected a store "
                "that all ranks see"
            )
        _check_pace(self.every, self.bandwidth)


Tier: TypeAlias = LocalTier | DirectoryTier | ObjectTier


def parse_tiers(tiers: Sequence[Any]) -> tuple[Tier, ...]:
    """Return the tiers, nearest first, after every check that needs no file.

    Raises
    ------
    TypeError, ValueError
        No tier, one of another type, two with one place, a local tier that is not the
        first, or an object store that is: a save writes files.
    """
    found = tuple(tiers)
    for tier in found:
        if not isinstance(tier, LocalTier | DirectoryTier | ObjectTier):
            raise TypeError(
                f"{tier!r} is no tier; expected LocalTier, DirectoryTier or ObjectTier"
            )
    if not found:
        raise ValueError("tiers is empty; expected at least one")
    if any(isinstance(tier, LocalTier) for tier in found[1:]):
        raise ValueError("a LocalTier can be the first tier only: a save writes there")
    places = [_words(tier) for tier in found]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"two tiers are {place}; give each a place of its own")
    if isinstance(found[0], ObjectTier):
        raise ValueError(
            "the first tier is an ObjectTier; a save writes files: put a LocalTier or "
            "a DirectoryTier before it"
        )
    return found


def tiers_of_run(
    run_dir: str | os.PathLike[str] | None,
    keep: KeepPolicy | int | None,
    tiers: Sequence[Any] | None,
) -> tuple[Tier, ...]:
    """Return the tiers of a run that was given as one directory, or as tiers.

    Raises
    ------
    TypeError, ValueError
        As `parse_tiers`; or both were given, or neither.
    """
    if tiers is None:
        if run_dir is None:
            raise TypeError("give a run directory, or tiers=[...]")
        return (DirectoryTier(run_dir, keep=keep),)
    if run_dir is not None:
        raise TypeError("give a run directory or tiers=[...], not both")
    if keep is not None:
        raise TypeError("with tiers=[...] each tier has a keep=... of its own")
    return parse_tiers(tiers)


def rate_of(tier: DirectoryTier | ObjectTier) -> float | None:
    """Return the bytes a second that copies to a tier may take, None for no limit."""
    bandwidth = tier.bandwidth
    return parse_rate(bandwidth) if isinstance(bandwidth, str) else bandwidth


def _words(tier: Tier) -> str:
    """Return the place of a tier, in one form."""
    if isinstance(tier, ObjectTier):
        return tier.url.rstrip("/")
    return os.path.abspath(tier.path)


def _check(place: Any, keep: KeepPolicy | int | None) -> None:
    if not isinstance(place, str | os.PathLike) or not os.fspath(place):
        raise TypeError(f"{place!r} is no path; expected that of a run")
    if keep is not None:
        parse_keep(keep)


def _check_shared(place: str | os.PathLike[str]) -> None:
    if "{node}" in os.fspath(place):
        raise ValueError(
            f"{place} has {{node}}, which is for a LocalTier; expected one place that "
            "all nodes see"
        )


def _check_pace(every: Any, bandwidth: Any) -> None:
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"every is {every!r}; expected an int")
    if every < 1:
        raise ValueError(f"every is {every}; expected 1 or more")
    if isinstance(bandwidth, str):
        parse_rate(bandwidth)
    elif bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"bandwidth is {bandwidth!r}; expected bytes a second above 0")
