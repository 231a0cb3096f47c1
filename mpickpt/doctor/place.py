"""What the file system of a directory tells when it is asked."""

import grp
import os
import stat
from contextlib import suppress
from pathlib import Path

from mpickpt.doctor.visit import Visit
from mpickpt.planning.file_systems import FileSystem
from mpickpt.planning.findings import (
    PermissionsFound,
    PlaceFound,
    QuotaFound,
    SpaceFound,
    StripesFound,
)
from mpickpt.planning.striping import complaint_about
from mpickpt.storage.filesystem import file_system_of
from mpickpt.storage.lustre import inherited_layout, osts
from mpickpt.storage.mount_options import mount_options_of
from mpickpt.storage.permissions import permission_notes
from mpickpt.storage.quota import Quota
from mpickpt.storage.space import space_of

_STATUS = Path("/proc/self/status")
# Where nobody has said how large a checkpoint is, or how many ranks there are.
_ASSUMED_SHARD_NBYTES = 1 << 30


def place_found(visit: Visit) -> PlaceFound:
    """Return what the file system of a directory tells.

    Raises
    ------
    StorageError
        If it does not say what it is.
    """
    directory, ask = visit.directory, visit.asking.ask
    file_system = file_system_of(directory)
    return PlaceFound(
        file_system=file_system,
        mount_options=mount_options_of(directory),
        space=ask("space", lambda: _space_found(directory, file_system)),
        stripes=ask("stripes", lambda: _stripes_found(visit, file_system)),
        permissions=ask("permissions", lambda: _permissions_found(visit)),
    )


def _space_found(directory: Path, file_system: FileSystem) -> SpaceFound:
    space = space_of(directory, file_system, max_age_s=0)
    return SpaceFound(
        free_nbytes=space.free_nbytes,
        total_nbytes=space.total_nbytes,
        free_inodes=space.free_inodes,
        quotas=tuple(map(_quota_found, space.quotas)),
        unknown=space.unknown,
    )


def _quota_found(quota: Quota) -> QuotaFound:
    return QuotaFound(
        kind=quota.kind,
        name=quota.name,
        source=quota.source,
        used_nbytes=quota.used_nbytes,
        limit_nbytes=quota.limit_nbytes,
        used_files=quota.used_files,
        limit_files=quota.limit_files,
        is_binding=quota.is_binding,
    )


def _stripes_found(visit: Visit, file_system: FileSystem) -> StripesFound | None:
    if file_system.kind != "lustre":
        return None
    layout = inherited_layout(visit.directory)
    targets = osts(visit.directory, layout.pool or None if layout else None)
    fullest = min(targets, key=lambda ost: ost.free_nbytes, default=None)
    # What suits one rank alone would say nothing of a job.
    ranks = max(2, visit.n_ranks or 0)
    shard_nbytes = _ASSUMED_SHARD_NBYTES
    if visit.checkpoint_nbytes is not None and visit.n_ranks is not None:
        shard_nbytes = visit.checkpoint_nbytes // visit.n_ranks
    complaint = None
    if layout is not None:
        complaint = complaint_about(
            layout,
            shard_nbytes=shard_nbytes,
            n_ranks=ranks,
            n_osts=len(targets) or None,
        )
    return StripesFound(
        layout=None if layout is None else str(layout),
        n_osts=len(targets) or None,
        fullest_ost=None if fullest is None else fullest.index,
        fullest_free_nbytes=None if fullest is None else fullest.free_nbytes,
        complaint=complaint,
    )


def _permissions_found(visit: Visit) -> PermissionsFound:
    directory, folder = visit.directory, visit.work / "a new directory"
    folder.mkdir()
    file = folder / "a new file"
    file.touch()
    notes = permission_notes(directory, [folder, file])
    above = os.stat(directory)
    return PermissionsFound(
        umask=_umask(),
        group=_group_name(above.st_gid),
        has_set_gid=bool(above.st_mode & stat.S_ISGID),
        complaints=tuple(
            note.replace(str(file), file.name).replace(str(folder), folder.name)
            for note in notes
        ),
    )


def _umask() -> str:
    # os.umask can only ask by setting it, for all threads.
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("Umask:"):
                return line.split()[1]
    return "unknown"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
