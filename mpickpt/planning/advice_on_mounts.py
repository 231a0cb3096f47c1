"""What follows from the kind of a file system and how it is mounted; pure rules."""

from collections.abc import Iterator

from mpickpt.planning.findings import Advice, Findings

# On local file systems they keep fsync from reaching the disk (ext4(5), and XFS of
# kernels before 4.19); on overlayfs (its documentation in the kernel) there is none.
_NO_BARRIER = ("nobarrier", "barrier=0")
_VOLATILE = "volatile"
# nfs(5): "A so-called soft timeout can cause silent data corruption in certain cases."
_SOFT = ("soft", "softerr")
_NEARLY_FULL_NBYTES = 1 << 30


def in_memory(findings: Findings) -> Iterator[Advice]:
    """Warn of what is gone with the power."""
    if findings.place.file_system.habits.survives_power_loss:
        return
    yield Advice(
        about="memory",
        is_grave=True,
        what=f"{findings.directory} is in the memory of this node",
        why=f"{findings.place.file_system.kind} keeps files in memory: a reboot, a "
        "loss of power or the end of the job takes every checkpoint with it",
        remedy="take it only for a first, fast copy of what a disk or a parallel file "
        "system also gets",
    )


def in_container(findings: Findings) -> Iterator[Advice]:
    """Warn of what goes with its container."""
    if findings.place.file_system.kind != "overlay":
        return
    yield Advice(
        about="overlay",
        is_grave=True,
        what=f"{findings.directory} is on an overlay, as the inside of a container is",
        why="what is written there goes when the container does, and no other node "
        "sees it",
        remedy="bind-mount a scratch directory of the host into the container "
        "(apptainer --bind /scratch, podman -v /scratch:/scratch) and save there",
    )


def on_object_store(findings: Findings) -> Iterator[Advice]:
    """Warn of stores that copy and delete where a rename is asked for."""
    if findings.place.file_system.kind != "object":
        return
    yield Advice(
        about="object store",
        is_grave=True,
        what=f"{findings.place.file_system.type} is an object store that looks like "
        "files",
        why="a checkpoint is published by one atomic rename, which object stores do "
        "not have: a reader, or a crash, may find half of it",
        remedy="save to a file system and copy finished checkpoints there",
    )


def not_synced(findings: Findings) -> Iterator[Advice]:
    """Warn of mount options that take the meaning from fsync."""
    found = [o for o in findings.place.mount_options if o in (*_NO_BARRIER, _VOLATILE)]
    if not found:
        return
    yield Advice(
        about="fsync",
        is_grave=True,
        what=f"it is mounted with {', '.join(found)}",
        why="fsync then returns before the disk has the bytes, so that a loss of power "
        "may take a checkpoint that was reported as saved",
        remedy="have it mounted without, or save elsewhere",
    )


def soft_nfs(findings: Findings) -> Iterator[Advice]:
    """Warn of a mount that gives up writes."""
    found = [option for option in findings.place.mount_options if option in _SOFT]
    if findings.place.file_system.kind != "nfs" or not found:
        return
    yield Advice(
        about="soft mount",
        is_grave=True,
        what=f"NFS is mounted with {', '.join(found)}",
        why="when the server is slow, such a mount gives up, and what was written is "
        "lost; nfs(5) warns of silent corruption",
        remedy="have it mounted with hard, the default",
    )


def names_come_late(findings: Findings) -> Iterator[Advice]:
    """Say that clients of NFS remember names that were absent."""
    if findings.place.file_system.kind != "nfs":
        return
    yield Advice(
        about="NFS",
        what="other nodes see new names late, by up to a minute",
        why="each client remembers for a while which names were there and which not; "
        "the library lists directories again, and waits",
        remedy="use one run directory for each job; noac is not needed and makes all "
        "else slow",
    )


def unknown_reach(findings: Findings) -> Iterator[Advice]:
    """Say that it is unknown whether an unknown file system is shared."""
    if findings.place.file_system.habits.reach != "unknown" or findings.n_hosts > 1:
        return
    if findings.place.file_system.kind == "overlay":
        return
    yield Advice(
        about="unknown file system",
        what=f"whether other nodes see {findings.directory} is not known",
        why=f"{findings.place.file_system.kind} is none of the file systems that the "
        "library knows",
        remedy="run this under mpiexec on two nodes: it then looks from both",
    )


def stripes(findings: Findings) -> Iterator[Advice]:
    """Say why the layout of new files does not suit one file per rank."""
    found = findings.place.stripes
    if found is None or found.complaint is None:
        return
    yield Advice(
        about="stripes",
        what=f"new files get this layout: {found.layout}",
        why=found.complaint,
        remedy='pass SaveOptions(striping="auto"), or set the layout of the run '
        "directory once with lfs setstripe",
    )


def full_ost(findings: Findings) -> Iterator[Advice]:
    """Warn of a full target, which refuses while the file system has room."""
    found = findings.place.stripes
    if found is None or found.fullest_free_nbytes is None:
        return
    # One process alone does not know how many shards there will be.
    n_shards = findings.n_ranks if findings.ranks is not None else None
    share = (findings.checkpoint_nbytes or 0) // n_shards if n_shards else 0
    if found.fullest_free_nbytes >= max(share, _NEARLY_FULL_NBYTES):
        return
    yield Advice(
        about="full OST",
        what=f"OST {found.fullest_ost} is nearly full",
        why="a file that is placed there fails with ENOSPC though the file system "
        "has room",
        remedy="remove files, or ask the site to move some off that OST (lfs_migrate)",
    )


MOUNT_RULES = (
    in_memory,
    in_container,
    on_object_store,
    not_synced,
    soft_nfs,
    names_come_late,
    unknown_reach,
    stripes,
    full_ost,
)
