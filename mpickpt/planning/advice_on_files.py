"""What follows from what one process tried out in a directory; pure rules."""

import re
from collections.abc import Iterator

from mpickpt.planning.cost import nbytes_said, rate_said, seconds_said
from mpickpt.planning.findings import Advice, Findings

# Probes without which no save gets through.
NEEDED_PROBES = (
    *("rename", "directory sync", "sync", "create", "exclusive create"),
    "write",
)
_SLOW_SYNC_S = 1.0
_SLOW_SMALL_SYNC_S = 0.1
_CLOCK_SKEW_S = 2.0
_LOWEST_HDF5 = (1, 10)
# What a core does with the SHA instructions is twice as much, without them half.
_SLOW_SHA256_BPS = 0.7e9
# The old checkpoint stays until the new one is published.
_N_CHECKPOINTS = 2
_FILES_BESIDE_SHARDS = 4


def refused(findings: Findings) -> Iterator[Advice]:
    """Say what a save needs and the file system refuses."""
    for failure in findings.failures_of(*NEEDED_PROBES):
        if failure.has_hung:
            continue
        yield Advice(
            about=failure.probe,
            is_grave=True,
            what=f"{failure.probe} fails: {failure.text}",
            why="a save does the same, and would fail with the same error",
            remedy="save elsewhere, or show this to who runs the file system",
        )


def hung(findings: Findings) -> Iterator[Advice]:
    """Warn of calls that have not come back."""
    for failure in findings.failures:
        if not failure.has_hung:
            continue
        yield Advice(
            about=f"{failure.probe} hangs",
            is_grave=True,
            what=f"{failure.probe} on {failure.host}: {failure.text}",
            why="a save or a load that does the same waits as long, and gives up after "
            "timeout_s at most",
            remedy="show this to who runs the file system: a server may be down, or a "
            "lock service",
        )


def not_replacing(findings: Findings) -> Iterator[Advice]:
    """Warn of a rename that is not atomic: it publishes nothing safely."""
    found = findings.tried.renaming
    if found is None or (found.replaces and not found.n_missed):
        return
    seen = (
        f"{found.n_missed} of {found.n_opened} who opened the name meanwhile found "
        "no file"
        if found.replaces
        else "the name does not stand for the new file afterwards"
    )
    yield Advice(
        about="rename",
        is_grave=True,
        what=f"a rename does not replace a file at once: {seen}",
        why="a checkpoint is published by one rename; a crash in between may leave "
        "neither the older nor the newer one",
        remedy="save to another file system",
    )


def losing_readers(findings: Findings) -> Iterator[Advice]:
    """Say that who opens or reads a file may lose it when it is replaced."""
    found = findings.tried.renaming
    if found is None or found.n_missed or not found.replaces:
        return
    if found.keeps_readers and not found.n_failed:
        return
    what = "who has a file open loses it when it is replaced"
    if found.keeps_readers:
        what = (
            f"opening a file that is being replaced fails now and then "
            f"({found.n_failed} of {found.n_opened})"
        )
    yield Advice(
        about="readers",
        what=what,
        why="readers of a checkpoint that is overwritten have to begin again, which "
        "the library's do, and other programs may not",
        remedy="save each step to a path of its own, as CheckpointManager does",
    )


def not_exclusive(findings: Findings) -> Iterator[Advice]:
    """Warn of two writers that may both create one file."""
    if findings.tried.creates_exclusively is not False:
        return
    yield Advice(
        about="exclusive create",
        is_grave=True,
        what="a file that exists is created once more though O_EXCL was asked for",
        why="two jobs could both believe that the run directory is theirs",
        remedy="save elsewhere, or never start two jobs on one run directory",
    )


def too_little_space(findings: Findings) -> Iterator[Advice]:
    """Warn of too little space: two checkpoints lie side by side for a while."""
    space, nbytes = findings.place.space, findings.checkpoint_nbytes
    if space is None:
        return
    needed = _N_CHECKPOINTS * (nbytes or 0)
    places = [("the file system has", space.free_nbytes)] + [
        (f"the quota of {quota.kind} {quota.name} leaves", quota.left_nbytes)
        for quota in space.quotas
    ]
    for whose, left in places:
        if left is None or left >= max(needed, 1):
            continue
        wanted = nbytes_said(needed) if nbytes else "a checkpoint"
        yield Advice(
            about="space",
            is_grave=True,
            what=f"{whose} {nbytes_said(left)} left; needed is {wanted}",
            why="a new checkpoint is whole before the one before it may go",
            remedy="remove checkpoints (mpickpt prune), or get more room",
        )


def too_few_inodes(findings: Findings) -> Iterator[Advice]:
    """Warn of too few inodes: each rank makes a file."""
    space = findings.place.space
    if space is None:
        return
    needed = _N_CHECKPOINTS * (findings.n_ranks + _FILES_BESIDE_SHARDS)
    places = [("the file system has", space.free_inodes)] + [
        (f"the quota of {quota.kind} {quota.name} leaves", quota.left_files)
        for quota in space.quotas
    ]
    for whose, left in places:
        if left is not None and left < needed:
            yield Advice(
                about="files",
                is_grave=True,
                what=f"{whose} room for {left} more files; two checkpoints are "
                f"{needed}",
                why="a checkpoint is one file for each rank, and a few more",
                remedy="remove files, or get a larger limit",
            )


def slow_sync(findings: Findings) -> Iterator[Advice]:
    """Say what to do about a slow fsync, for which a program need not wait."""
    small, large = findings.tried.sync_1mib, findings.tried.sync_16mib
    if small is None or large is None:
        return
    if small.median_s < _SLOW_SMALL_SYNC_S and large.worst_s < _SLOW_SYNC_S:
        return
    yield Advice(
        about="slow sync",
        what=f"fsync takes {seconds_said(small.median_s)} after 1 MiB and "
        f"{seconds_said(large.worst_s)} after 16 MiB",
        why="every rank syncs its shard before a checkpoint is published",
        remedy="save asynchronously (save_sharded_async, or CheckpointManager, which "
        "does), and leave timeout_s at its 600 s or above",
    )


def no_direct_io(findings: Findings) -> Iterator[Advice]:
    """Say that a copy is made where O_DIRECT would save it."""
    found = findings.tried.direct_io
    if found is None or found.is_accepted:
        return
    if not findings.place.file_system.habits.direct_io:
        return
    yield Advice(
        about="direct I/O",
        what=f"direct I/O is refused ({found.errno or 'not known to this system'})",
        why="the library goes through the page cache then, which costs a copy",
        remedy="nothing has to be done; MPICKPT_DIRECT_IO=off saves the attempt",
    )


def no_locks(findings: Findings) -> Iterator[Advice]:
    """Say what tools need that lock what they open."""
    found = findings.tried.locks
    if found is None or found.are_granted:
        return
    answers = f"flock: {found.flock}, fcntl: {found.fcntl}"
    yield Advice(
        about="locks",
        what=f"the file system refuses locks ({answers})",
        why="the library does without: each shard has one writer and a name of its "
        "own; but HDF5 locks every file that it opens, and fails here",
        remedy="export HDF5_USE_FILE_LOCKING=FALSE for h5dump, h5py and other tools",
    )


def hidden_from_group(findings: Findings) -> Iterator[Advice]:
    """Say from whom new checkpoints are hidden who can read the directory."""
    found = findings.place.permissions
    if found is None:
        return
    for complaint in found.complaints:
        yield Advice(
            about="permissions",
            what=complaint,
            why=f"new files follow the umask (here {found.umask}) and the directory; "
            "the library changes neither behind your back",
            remedy="set the umask in the job script, and chmod g+s the run directory",
        )


def odd_clock(findings: Findings) -> Iterator[Advice]:
    """Warn of times of files that are another clock's."""
    skew_s = findings.tried.clock_skew_s
    if skew_s is None or abs(skew_s) < _CLOCK_SKEW_S:
        return
    yield Advice(
        about="clock",
        what=f"the file system's clock is {seconds_said(abs(skew_s))} "
        f"{'ahead of' if skew_s > 0 else 'behind'} this node's",
        why="the library orders checkpoints by step, not by time, but make, rsync "
        "and purging by age go by it",
        remedy="tell who runs the machine: NTP should hold clocks together",
    )


def old_hdf5(findings: Findings) -> Iterator[Advice]:
    """Warn of an HDF5 before 1.10, or of none."""
    found = findings.versions
    if found.h5py is None or found.hdf5 is None:
        yield Advice(
            about="h5py",
            is_grave=True,
            what="h5py cannot be imported",
            why="HDF5 lays out the shards of a save; loading does without",
            remedy="pip install h5py, or load the site's module of it",
        )
        return
    numbers = tuple(int(n) for n in re.findall(r"\d+", found.hdf5)[:2])
    if numbers >= _LOWEST_HDF5:
        return
    yield Advice(
        about="HDF5",
        is_grave=True,
        what=f"h5py {found.h5py} was built with HDF5 {found.hdf5}",
        why="shards are written in the form of HDF5 1.10",
        remedy="install an h5py that was built with HDF5 1.10 or later",
    )


def slow_digests(findings: Findings) -> Iterator[Advice]:
    """Say what makes digests slow."""
    found = findings.processor
    if not found.has_zlib_ng:
        yield Advice(
            about="zlib-ng",
            what="zlib-ng is not installed",
            why=f"zlib of Python's library does CRC-32 at {rate_said(found.crc32_bps)} "
            "here; zlib-ng is several times as fast",
            remedy="pip install zlib-ng",
        )
    if found.sha256_bps < _SLOW_SHA256_BPS:
        yield Advice(
            about="SHA-256",
            what=f"a core does SHA-256 at {rate_said(found.sha256_bps)}",
            why="this processor, or this Python's OpenSSL, lacks its instructions",
            remedy='save asynchronously, and load with verify="crc32"',
        )


FILE_RULES = (
    refused,
    hung,
    not_replacing,
    losing_readers,
    not_exclusive,
    too_little_space,
    too_few_inodes,
    slow_sync,
    no_direct_io,
    no_locks,
    hidden_from_group,
    odd_clock,
    old_hdf5,
    slow_digests,
)
