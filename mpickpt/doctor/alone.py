"""What one process finds out about a directory, by itself."""

import hashlib
import os
import platform
from collections.abc import Callable
from importlib.util import find_spec
from time import thread_time

from mpickpt.doctor.place import place_found
from mpickpt.doctor.versions import installed_versions
from mpickpt.doctor.visit import Visit
from mpickpt.format.digest import crc32
from mpickpt.planning.findings import Findings
from mpickpt.planning.probed import ProcessorFound, SpeedFound, Timing, Tried
from mpickpt.storage import latency, probes
from mpickpt.storage.latency import Often
from mpickpt.storage.speed import measured_speed

_MIB = 1 << 20
_LEAST_NBYTES = 8 * _MIB
_DIGESTED_NBYTES = 32 * _MIB
_N_DIGESTS = 3


def examine(visit: Visit, mpi: str | None) -> Findings:
    """Return what can be found out about a directory by one process.

    Parameters
    ----------
    visit : Visit
        Where, and how thoroughly.
    mpi : str or None
        What the MPI of this process calls itself, if there is one.

    Raises
    ------
    StorageError
        If the file system does not say what it is.
    """
    return Findings(
        directory=str(visit.directory),
        host=platform.node(),
        checkpoint_nbytes=visit.checkpoint_nbytes,
        place=place_found(visit),
        tried=_tried(visit),
        processor=_processor(),
        versions=installed_versions(mpi),
    )


def _tried(visit: Visit) -> Tried:
    ask, work, often = visit.asking.ask, visit.work, visit.effort.often
    files = Often(visit.effort.n_files, 2 * often.budget_s)
    once = Often(1, 0)
    large = ask("sync", lambda: latency.probe_sync(work, 16 * _MIB, once))
    return Tried(
        sync_16mib=large,
        sync_1mib=ask("sync", lambda: latency.probe_sync(work, _MIB, often)),
        renaming=ask("rename", lambda: probes.probe_renaming(work, often)),
        directory_sync=ask(
            "directory sync", lambda: latency.probe_directory_sync(work, often)
        ),
        creating=ask("create", lambda: latency.probe_creating(work, files)),
        creates_exclusively=ask(
            "exclusive create", lambda: probes.probe_exclusive(work)
        ),
        direct_io=ask("direct I/O", lambda: probes.probe_direct_io(work)),
        locks=ask("locks", lambda: probes.probe_locks(work)),
        clock_skew_s=ask("clock", lambda: probes.probe_clock(work)),
        speed=ask("write", lambda: _speed(visit, large)),
    )


def speed_nbytes(visit: Visit, synced: Timing | None) -> int:
    """Return how many bytes to measure speed with, so that it does not take long.

    Parameters
    ----------
    visit : Visit
        Where; no more than an eighth of what is free there.
    synced : Timing or None
        What syncing 16 MiB took there.
    """
    usage = os.statvfs(visit.directory)
    most = min(visit.effort.speed_nbytes, usage.f_bavail * usage.f_frsize // 8)
    if synced is not None and synced.median_s > 0:
        most = min(most, int(16 * _MIB / synced.median_s * visit.effort.speed_s))
    return max(most, _LEAST_NBYTES)


def _speed(visit: Visit, synced: Timing | None) -> SpeedFound:
    return measured_speed(visit.work, speed_nbytes(visit, synced))


def _processor() -> ProcessorFound:
    content = memoryview(os.urandom(_MIB) * (_DIGESTED_NBYTES // _MIB))
    return ProcessorFound(
        sha256_bps=_rate(lambda: hashlib.sha256(content).digest()),
        crc32_bps=_rate(lambda: crc32(content)),
        has_zlib_ng=find_spec("zlib_ng") is not None,
    )


def _rate(digest: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_N_DIGESTS):
        # Of this thread: other programs on the core do not make it slow.
        begin = thread_time()
        digest()
        seconds.append(thread_time() - begin)
    return _DIGESTED_NBYTES / max(min(seconds), 1e-9)
