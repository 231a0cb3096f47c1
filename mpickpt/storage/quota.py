"""Finds the quotas that a directory's file system sets to this user; reads only.

Every kind of file system has its own way to ask. What does not answer is unknown, and
never an error.
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mpickpt.planning.file_systems import FileSystem
from mpickpt.storage.file_owner import (
    group_of_new_files,
    project_of_new_files,
)
from mpickpt.storage.quota_tables import (
    Row,
    Use,
    parse_fileset,
    parse_lfs_quota,
    parse_mmlsquota,
    parse_qgroups,
    parse_quota,
)
from mpickpt.storage.quotactl import kernel_quota
from mpickpt.storage.site_command import run_site_command

FRESH_FOR_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a user, a group or a project has used, and may use.

    Attributes
    ----------
    kind : {"user", "group", "project"}
        Whose; "project" also stands for a directory, a fileset, a qgroup.
    name : str
        Of the user, group or project, or its number.
    used_nbytes, used_files : int or None
        None if that is not known.
    limit_nbytes, limit_files : int or None
        What cannot be passed: the hard limit or, after its grace period, the soft one.
        None if there is none, or none is known.
    soft_nbytes, soft_files : int or None
        What may be passed for some days.
    source : {"lfs quota", "mmlsquota", "quota", "quotactl", "btrfs", "ceph.quota"}
        Who says so.
    is_binding : bool
        False if this process may pass the limits: root may on most file systems.
    """

    kind: str
    name: str
    source: str
    used_nbytes: int | None = None
    limit_nbytes: int | None = None
    soft_nbytes: int | None = None
    used_files: int | None = None
    limit_files: int | None = None
    soft_files: int | None = None
    is_binding: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """All quotas that are known to bind what is written in a directory.

    Attributes
    ----------
    known : tuple of Quota
        Those that are set.
    unknown : tuple of str
        What could not be asked, each with its reason.
    """

    known: tuple[Quota, ...] = ()
    unknown: tuple[str, ...] = ()


_remembered: dict[tuple[str, int, int], tuple[float, Quotas]] = {}


def quotas_of(
    directory: Path, file_system: FileSystem, *, max_age_s: float = FRESH_FOR_S
) -> Quotas:
    """Return the quotas that bind this process in a directory.

    Parameters
    ----------
    directory : Path
        Exists.
    file_system : FileSystem
        On which it lies.
    max_age_s : float
        An answer of this age, for a directory beside it, will do.

    Notes
    -----
    For rank 0: it may start the programs of the site, which take up to two seconds
    each, and none again if one hangs.
    """
    ask = _ASK.get(file_system.kind)
    if ask is None:
        return _none_asked(file_system)
    key = (str(directory.parent), os.geteuid(), os.getegid())
    asked_at, answer = _remembered.get(key, (float("-inf"), Quotas()))
    if time.monotonic() - asked_at > max_age_s:
        found = list(ask(directory, file_system))
        answer = Quotas(
            known=tuple(one for one in found if isinstance(one, Quota)),
            unknown=tuple(one for one in found if isinstance(one, str)),
        )
        _remembered[key] = (time.monotonic(), answer)
    return answer


def _none_asked(file_system: FileSystem) -> Quotas:
    if file_system.kind == "tmpfs":
        return Quotas()
    reason = f"quotas: no way is known to ask {file_system.kind} for them"
    return Quotas(unknown=(reason,))


def _ask_lustre(directory: Path, _: FileSystem) -> Iterator[Quota | str]:
    for kind, number in _owners_of(directory):
        command = ["lfs", "quota", "-q", f"-{kind[0]}", str(number), str(directory)]
        # EIO: some servers do not answer; the table says by "[]" what is not sure.
        text = run_site_command(command, exit_codes=(0, errno.EIO))
        row = parse_lfs_quota(text) if text is not None else None
        if row is None:
            yield f"quota of the {kind}: lfs quota does not tell"
        else:
            row = replace(row, kind=kind, name=str(number))
            # Root writes with OBD_BRW_NOQUOTA (osc_cache.c of Lustre).
            yield from _quotas_in(row, "lfs quota", is_binding=not _is_root())


def _ask_gpfs(directory: Path, file_system: FileSystem) -> Iterator[Quota | str]:
    device = os.path.basename(file_system.source)
    text = run_site_command(["mmlsattr", "-L", str(directory)])
    fileset = parse_fileset(text) if text is not None else None
    wanted = [
        ("user", ["-u", str(os.geteuid())]),
        ("group", ["-g", str(group_of_new_files(directory))]),
    ]
    if fileset:
        wanted.append(("project", ["-j", fileset]))
    for kind, whose in wanted:
        text = run_site_command(["mmlsquota", "-v", "-Y", *whose, device])
        rows = [row for row in parse_mmlsquota(text or "") if row.kind == kind]
        # A user may have a quota in each fileset; only that of ours counts.
        rows = [row for row in rows if row.fileset in ("", fileset)]
        if len(rows) == 1:
            # Not enforced for root by default (mmlsquota, IBM Storage Scale).
            yield from _quotas_in(rows[0], "mmlsquota", is_binding=not _is_root())
        else:
            yield f"quota of the {kind}: mmlsquota does not tell"


def _ask_nfs(directory: Path, file_system: FileSystem) -> Iterator[Quota | str]:
    command = ["quota", "-ugvwp", "-f", file_system.point or str(directory)]
    # 1: something is passed, or not told.
    text = run_site_command(command, exit_codes=(0, 1))
    rows = parse_quota(text or "", time.time())
    for kind, number in _owners_of(directory)[:2]:
        if (kind, number) in rows:
            # The server may take root for root, or for nobody.
            row = rows[kind, number]
            yield from _quotas_in(row, "quota", is_binding=not _is_root())
        else:
            yield f"quota of the {kind}: quota -f does not tell"


def _ask_kernel(directory: Path, file_system: FileSystem) -> Iterator[Quota | str]:
    for kind, number in _owners_of(directory):
        try:
            found = kernel_quota(directory, file_system.source, kind, number)
        except OSError as error:
            if kind == "project":  # statfs(2) tells us in its directories
                continue
            yield f"quota of the {kind}: the kernel does not tell ({error.strerror})"
            continue
        if found is None:
            continue
        space, files, is_enforced = found
        # CAP_SYS_RESOURCE passes all limits of fs/quota/dquot.c; XFS only exempts 0.
        is_free = number == 0 if file_system.kind == "xfs" else _is_root()
        row = Row(kind=kind, name=str(number), space=space, files=files)
        yield from _quotas_in(row, "quotactl", is_binding=is_enforced and not is_free)


def _ask_btrfs(directory: Path, _: FileSystem) -> Iterator[Quota | str]:
    if not _is_root():
        yield "qgroups: only root may ask btrfs for them"
        return
    command = ["btrfs", "qgroup", "show", "-reF", "--raw", str(directory)]
    # 1: there are no quotas.
    text = run_site_command(command, exit_codes=(0, 1))
    if text is None:
        yield "qgroups: btrfs qgroup show does not tell"
    for name, referred, most, own, most_own in parse_qgroups(text or ""):
        for used, limit in ((referred, most), (own, most_own)):
            if limit is not None:
                yield Quota(
                    kind="project",
                    name=f"qgroup {name}",
                    source="btrfs",
                    used_nbytes=used,
                    limit_nbytes=limit,
                )


def _ask_ceph(directory: Path, file_system: FileSystem) -> Iterator[Quota | str]:
    """Ask each directory from here up to where it is mounted: all limits count.

    Virtual attributes, see docs.ceph.com, "CephFS quotas" and "Directory statistics".
    """
    for folder in (directory, *directory.parents):
        quota = Quota(
            kind="project",
            name=str(folder),
            source="ceph.quota",
            used_nbytes=_number_at(folder, "ceph.dir.rbytes"),
            limit_nbytes=_number_at(folder, "ceph.quota.max_bytes") or None,
            used_files=_number_at(folder, "ceph.dir.rentries"),
            limit_files=_number_at(folder, "ceph.quota.max_files") or None,
        )
        if quota.limit_nbytes or quota.limit_files:
            yield quota
        if str(folder) == file_system.point:
            return


_ASK: dict[str, Callable[[Path, FileSystem], Iterator[Quota | str]]] = {
    "lustre": _ask_lustre,
    "gpfs": _ask_gpfs,
    "nfs": _ask_nfs,
    "ext4": _ask_kernel,
    "xfs": _ask_kernel,
    "btrfs": _ask_btrfs,
    "cephfs": _ask_ceph,
}


def _quotas_in(row: Row, source: str, *, is_binding: bool) -> Iterator[Quota | str]:
    """Return the quota of a row, if limits are set, and what of it is not known."""
    for use, what in ((row.space, "bytes"), (row.files, "files")):
        if not use.is_known:
            yield f"quota of {row.kind} {row.name}: {source} is not sure of the {what}"
    space = row.space if row.space.is_known else _NOTHING
    files = row.files if row.files.is_known else _NOTHING
    if any((space.soft, space.hard, files.soft, files.hard)):
        yield Quota(
            kind=row.kind,
            name=row.name,
            source=source,
            used_nbytes=space.used,
            limit_nbytes=space.limit,
            soft_nbytes=space.soft or None,
            used_files=files.used,
            limit_files=files.limit,
            soft_files=files.soft or None,
            is_binding=is_binding,
        )


_NOTHING = Use(used=None, soft=None, hard=None)


def _owners_of(directory: Path) -> list[tuple[str, int]]:
    """Return for whom new files in a directory count: user, group, project if any."""
    owners = [("user", os.geteuid()), ("group", group_of_new_files(directory))]
    project = project_of_new_files(directory)
    return [*owners, ("project", project)] if project else owners


def _is_root() -> bool:
    return os.geteuid() == 0


def _number_at(folder: Path, attribute: str) -> int | None:
    try:
        return int(os.getxattr(folder, attribute))
    except (OSError, ValueError):
        return None
