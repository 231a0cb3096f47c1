"""Says in words what one process tried in a directory, and how fast it was."""

from mpickpt.doctor.words import NOT_FOUND, PRECISION_S, Lines, timing_said
from mpickpt.planning.cost import nbytes_said, rate_said, seconds_said
from mpickpt.planning.findings import Findings
from mpickpt.planning.probed import (
    DirectIoFound,
    LocksFound,
    RenamingFound,
    Tried,
)
from mpickpt.planning.stripe_layout import size_text

_EXCLUSIVE = {True: "kept", False: "NOT kept", None: NOT_FOUND}


def behaviour_lines(tried: Tried) -> Lines:
    """Return the lines about what the file system does."""
    yield "rename", _renaming_said(tried.renaming)
    yield "sync of a directory", timing_said(tried.directory_sync)
    yield "exclusive create", _EXCLUSIVE[tried.creates_exclusively]
    yield "direct I/O", _direct_said(tried.direct_io)
    yield "locks", _locks_said(tried.locks)
    skew_s = tried.clock_skew_s
    if skew_s is None:
        yield "clock", NOT_FOUND
    elif abs(skew_s) < PRECISION_S:
        yield "clock", "the same as this node's"
    else:
        word = "ahead of" if skew_s > 0 else "behind"
        yield "clock", f"{seconds_said(abs(skew_s))} {word} this node's"


def speed_lines(findings: Findings) -> Lines:
    """Return the lines about speed."""
    tried, processor = findings.tried, findings.processor
    speed, made = tried.speed, tried.creating
    if speed is None:
        yield "write, read", NOT_FOUND
    else:
        size = size_text(speed.nbytes)
        yield "write", f"{rate_said(speed.write_bps)} ({size}, synced)"
        yield (
            "read",
            (f"{rate_said(speed.read_bps)} ({size}, this node's page cache dropped)"),
        )
    yield "sync of 1 MiB", timing_said(tried.sync_1mib)
    yield "sync of 16 MiB", timing_said(tried.sync_16mib)
    if made is not None:
        yield (
            "small files",
            (
                f"{made.creates_per_s:,.0f} made a second, "
                f"{made.removes_per_s:,.0f} removed"
            ),
        )
    by = "zlib-ng" if processor.has_zlib_ng else "zlib"
    yield (
        "digests of a core",
        (
            f"SHA-256 {rate_said(processor.sha256_bps)}, "
            f"CRC-32 {rate_said(processor.crc32_bps)} by {by}"
        ),
    )
    yield from _save_lines(findings)


def _renaming_said(found: RenamingFound | None) -> str:
    if found is None:
        return NOT_FOUND
    if not found.replaces:
        return "does NOT replace a file"
    how = "replaces at once"
    if found.n_missed:
        how = f"leaves NO file for a moment ({found.n_missed} of {found.n_opened})"
    readers = "keep" if found.keeps_readers else "LOSE"
    return f"{how}, readers {readers} the old file; {timing_said(found.timing)}"


def _direct_said(found: DirectIoFound | None) -> str:
    if found is None:
        return NOT_FOUND
    if found.is_accepted:
        return f"taken, in multiples of {found.alignment_nbytes} bytes"
    return f"refused ({found.errno or 'this system has none'})"


def _locks_said(found: LocksFound | None) -> str:
    if found is None:
        return NOT_FOUND
    if found.are_granted:
        return "granted (flock and fcntl); the library needs none"
    return f"flock: {found.flock}, fcntl: {found.fcntl}; the library needs none"


def _save_lines(findings: Findings) -> Lines:
    nbytes, ranks = findings.checkpoint_nbytes, findings.ranks
    bps = ranks and ranks.total_write_bps
    if bps is None and findings.tried.speed is not None:
        bps = findings.tried.speed.write_bps
    if nbytes is not None and bps:
        who = f"{findings.n_ranks} ranks" if findings.n_ranks > 1 else "one process"
        yield (
            f"save of {nbytes_said(nbytes)}",
            (f"{seconds_said(nbytes / bps)} for {who} at the speed measured here"),
        )
