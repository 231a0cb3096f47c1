"""Tells whether what is to be written fits, by every limit that is known; reads only.

A save that cannot fit is refused before it writes a byte. Limits that cannot be asked
for do not refuse anything: they are said once.
"""

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mpickpt.errors import StorageError
from mpickpt.planning.file_systems import FileSystem
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.quota import FRESH_FOR_S, Quota, quotas_of

log = logging.getLogger(__name__)

# Some file systems that count nothing call that as many as there can be.
_UNCOUNTED = 1 << 62

_said: set[tuple[str, str]] = set()


class Target(Protocol):
    """A server's storage of which a file system is made: an OST of Lustre."""

    @property
    def index(self) -> int:
        """Its number."""

    @property
    def free_nbytes(self) -> int:
        """What can still be written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What may still be written in a directory.

    Attributes
    ----------
    free_nbytes, total_nbytes : int or None
        Of the file system, or of the project that the directory belongs to; None where
        it does not count.
    free_inodes : int or None
        How many files may still be made; None where there is no such limit.
    quotas : tuple of Quota
        Those that are known.
    unknown : tuple of str
        What could not be found out, each with its reason.
    """

    free_nbytes: int | None
    total_nbytes: int | None
    free_inodes: int | None
    quotas: tuple[Quota, ...]
    unknown: tuple[str, ...]

    @property
    def room_nbytes(self) -> int | None:
        """How much may still be written by all limits that bind; None if none do."""
        rooms = [] if self.free_nbytes is None else [self.free_nbytes]
        for quota in self.quotas:
            used, limit = quota.used_nbytes, quota.limit_nbytes
            if quota.is_binding and used is not None and limit is not None:
                rooms.append(max(limit - used, 0))
        return min(rooms, default=None)


def space_of(
    directory: Path, file_system: FileSystem, *, max_age_s: float = FRESH_FOR_S
) -> Space:
    """Return what may still be written in a directory.

    Parameters
    ----------
    directory : Path
        Exists.
    file_system : FileSystem
        On which it lies.
    max_age_s : float
        How old an answer about quotas may be.

    Raises
    ------
    StorageError
        If the file system does not answer.
    """
    quotas = quotas_of(directory, file_system, max_age_s=max_age_s)
    # In a directory of a project, ext4, XFS and Lustre tell what is left of its soft
    # limit, which may be passed, and which does not bind root.
    is_told = any(quota.kind == "project" for quota in quotas.known)
    asked = Path(file_system.point) if is_told and file_system.point else directory
    with storage_errors("ask for the free space of", asked):
        usage = os.statvfs(asked)
    # Local file systems keep blocks that root alone may use; what a server lets root
    # do, it does not say here.
    is_roots = os.geteuid() == 0 and file_system.habits.reach == "node"
    free = usage.f_bfree if is_roots else usage.f_bavail
    files = usage.f_ffree if is_roots else usage.f_favail
    unknown = quotas.unknown
    if usage.f_blocks == 0:
        unknown = ("free space: the file system does not count it", *unknown)
    return Space(
        free_nbytes=free * usage.f_frsize if usage.f_blocks else None,
        total_nbytes=usage.f_blocks * usage.f_frsize if usage.f_blocks else None,
        # 0 in all where inodes are made as they are needed.
        free_inodes=files if usage.f_files and files < _UNCOUNTED else None,
        quotas=quotas.known,
        unknown=unknown,
    )


def require_space(
    directory: Path,
    file_system: FileSystem,
    *,
    nbytes: int,
    n_files: int,
    osts: Sequence[Target] | None = None,
) -> None:
    """Refuse what cannot fit in a directory.

    Parameters
    ----------
    directory : Path
        Exists.
    file_system : FileSystem
        On which it lies.
    nbytes, n_files : int
        What is going to be written there.
    osts : sequence of Target, optional
        Where Lustre can put it: the OSTs of the directory's pool, or all.

    Raises
    ------
    StorageError
        It does not fit: by ENOSPC the file system is too full, by EDQUOT a quota is
        too small. The text tells each limit that is short.

    Notes
    -----
    For rank 0. What is not known, and what only may become short, is logged once for
    all checkpoints of a run.
    """
    space = space_of(directory, file_system)
    if list(_shortages(space, file_system, nbytes, n_files, osts)):
        # Somebody may have made room since quotas were last asked for.
        space = space_of(directory, file_system, max_age_s=0)
    shortages = list(_shortages(space, file_system, nbytes, n_files, osts))
    if shortages:
        number = min(shortages, key=lambda short: short.errno != errno.ENOSPC).errno
        raise StorageError(
            f"{directory}: the checkpoint needs {nbytes} bytes in {n_files} files, but "
            f"{'; '.join(short.text for short in shortages)}: {_way_out(shortages)}",
            errno=number,
            path=str(directory),
        )
    if space.unknown:
        text = (
            f"{directory}: not known before it is written: {'; '.join(space.unknown)}"
        )
        _say_once(logging.INFO, directory, "unknown", text)
    for quota in space.quotas:
        _warn_of_soft(directory, quota, nbytes, n_files)
    if osts:
        _warn_of_full(directory, osts, nbytes // max(n_files, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shortage:
    errno: int
    text: str


def _shortages(
    space: Space,
    file_system: FileSystem,
    nbytes: int,
    n_files: int,
    osts: Sequence[Target] | None,
) -> Iterator[_Shortage]:
    free, inodes = space.free_nbytes, space.free_inodes
    if free is not None and free < nbytes:
        yield _Shortage(errno=errno.ENOSPC, text=f"{file_system} has {free} bytes free")
    if inodes is not None and inodes < n_files:
        yield _Shortage(
            errno=errno.ENOSPC,
            text=f"{file_system} has room for {inodes} more files (inodes)",
        )
    in_all = sum(ost.free_nbytes for ost in osts or ())
    if osts and in_all < nbytes:
        yield _Shortage(
            errno=errno.ENOSPC,
            text=f"the {len(osts)} OSTs it may use have {in_all} bytes free in all",
        )
    for quota in space.quotas:
        yield from _shortages_of(quota, nbytes, n_files)


def _shortages_of(quota: Quota, nbytes: int, n_files: int) -> Iterator[_Shortage]:
    for needed, limit, used, unit in (
        (nbytes, quota.limit_nbytes, quota.used_nbytes, "bytes"),
        (n_files, quota.limit_files, quota.used_files, "files"),
    ):
        if not quota.is_binding or limit is None or used is None:
            continue
        left = max(limit - used, 0)
        if left < needed:
            yield _Shortage(
                errno=errno.EDQUOT,
                text=f"the quota of {quota.kind} {quota.name} has {left} {unit} free, "
                f"{used} of {limit} used ({quota.source})",
            )


def _way_out(shortages: Sequence[_Shortage]) -> str:
    ways = ["remove older checkpoints (mpickpt prune)", "save elsewhere"]
    if any(short.errno == errno.EDQUOT for short in shortages):
        ways.insert(1, "ask for a larger quota")
    return ", ".join(ways[:-1]) + f" or {ways[-1]}"


def _warn_of_soft(directory: Path, quota: Quota, nbytes: int, n_files: int) -> None:
    for needed, soft, used, unit in (
        (nbytes, quota.soft_nbytes, quota.used_nbytes, "bytes"),
        (n_files, quota.soft_files, quota.used_files, "files"),
    ):
        if not quota.is_binding or soft is None or used is None:
            continue
        if used + needed > soft:
            text = (
                f"{directory}: with this checkpoint, {used + needed} {unit} are more "
                f"than the soft limit of {quota.kind} {quota.name}, {soft}: when its "
                f"grace period is over, nothing can be saved ({quota.source})"
            )
            _say_once(logging.WARNING, directory, f"soft {quota.kind} {unit}", text)


def _warn_of_full(directory: Path, osts: Sequence[Target], share: int) -> None:
    """Warn of OSTs that cannot take one shard: Lustre may put one there."""
    full = [ost for ost in osts if ost.free_nbytes < share]
    if full:
        least = min(full, key=lambda ost: ost.free_nbytes)
        text = (
            f"{directory}: {len(full)} of {len(osts)} OSTs have less than the {share} "
            f"bytes of a shard free, OST {least.index} {least.free_nbytes}: a shard "
            f"that comes to lie there fails, though others have room"
        )
        _say_once(logging.WARNING, directory, "full OSTs", text)


def _say_once(level: int, directory: Path, topic: str, text: str) -> None:
    key = (str(directory.parent), topic)
    if key not in _said:
        _said.add(key)
        log.log(level, "%s", text)
