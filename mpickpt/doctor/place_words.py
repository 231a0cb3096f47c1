"""Says in words what the file system of a directory is, and what is installed."""

from collections.abc import Callable

from mpickpt.doctor.words import NOT_FOUND, Lines
from mpickpt.planning.cost import nbytes_said
from mpickpt.planning.findings import (
    Findings,
    PlaceFound,
    QuotaFound,
    StripesFound,
)
from mpickpt.planning.stripe_layout import size_text

_REACH = {
    "nodes": "all nodes that mount it",
    "node": "this node alone",
    "unknown": "not known: run this under mpiexec on two nodes",
}
_LONGEST_VALUE = 40


def place_lines(findings: Findings) -> Lines:
    """Return the lines about the file system."""
    place, system = findings.place, findings.place.file_system
    # What has neither is a name without a meaning: "tmpfs", "none".
    is_telling = "/" in system.source or ":" in system.source
    source = f", mounted from {system.source}" if is_telling else ""
    yield "kind", f"{system}{source}"
    if place.mount_options:
        yield "mount options", ", ".join(map(_shortened, place.mount_options))
    yield "seen by", _reach_said(findings)
    yield "block size", size_text(system.block_nbytes)
    yield from _space_lines(place)
    if place.stripes is not None:
        yield "stripes", _stripes_said(place.stripes)
    who = place.permissions
    if who is not None:
        set_gid = "set-gid" if who.has_set_gid else "no set-gid"
        yield (
            "new files",
            f"umask {who.umask}; directory of group {who.group}, {set_gid}",
        )


def _reach_said(findings: Findings) -> str:
    system = findings.place.file_system
    if system.kind == "overlay":
        return "this container"
    reach = system.habits.reach
    if reach == "unknown" and findings.n_hosts > 1:
        return "not known of this kind; see below"
    return _REACH[reach]


def version_lines(findings: Findings) -> Lines:
    """Return the lines about what is installed."""
    found = findings.versions
    yield "Python", f"{found.python}, numpy {found.numpy}, Linux {found.kernel}"
    hdf5 = "cannot be imported" if found.hdf5 is None else f"HDF5 {found.hdf5}"
    yield "h5py", f"{found.h5py or 'not installed'}, {hdf5}"
    mpi = " ".join(found.mpi.split()) if found.mpi else "its MPI cannot be loaded"
    yield "mpi4py", f"{found.mpi4py}, {mpi}" if found.mpi4py else "not installed"


def failure_lines(findings: Findings) -> Lines:
    """Return the lines about what did not work."""
    for failure in findings.failures:
        host = f"{failure.host}: " if findings.n_hosts > 1 else ""
        number = f" ({failure.errno})" if failure.errno else ""
        yield failure.probe, f"{host}{failure.text}{number}"


def _shortened(option: str) -> str:
    # Overlays list all their layers here.
    name, _, value = option.partition("=")
    return f"{name}=..." if len(value) > _LONGEST_VALUE else option


def _space_lines(place: PlaceFound) -> Lines:
    space = place.space
    if space is None:
        yield "free space", NOT_FOUND
        return
    total = (
        "" if space.total_nbytes is None else f" of {nbytes_said(space.total_nbytes)}"
    )
    free = space.free_nbytes
    yield "free space", "not counted" if free is None else nbytes_said(free) + total
    inodes = space.free_inodes
    yield "free inodes", "no limit" if inodes is None else f"{inodes:,}"
    for quota in space.quotas:
        yield f"quota of {quota.kind}", _quota_said(quota)
    for text in space.unknown:
        yield "not known", text


def _quota_said(quota: QuotaFound) -> str:
    nbytes = _of_limit(quota.used_nbytes, quota.limit_nbytes, nbytes_said)
    files = _of_limit(quota.used_files, quota.limit_files, "{:,} files".format)
    bound = "" if quota.is_binding else "; does not bind this user"
    return f"{quota.name}: {nbytes}; {files} ({quota.source}){bound}"


def _of_limit(used: int | None, limit: int | None, said: Callable[[int], str]) -> str:
    now = "use not known" if used is None else f"{said(used)} used"
    return f"{now}, no limit" if limit is None else f"{now} of {said(limit)}"


def _stripes_said(stripes: StripesFound) -> str:
    layout = stripes.layout or "not known: neither lfs nor the attribute tells"
    if stripes.n_osts is None:
        return f"{layout}; OSTs not known, lfs df does not tell"
    free = nbytes_said(stripes.fullest_free_nbytes or 0)
    return (
        f"{layout}; {stripes.n_osts} OSTs, OST {stripes.fullest_ost} has least: {free}"
    )
