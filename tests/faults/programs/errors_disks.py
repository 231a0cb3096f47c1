"""MPI program: saves on a disk that fills, is remounted, or lets nobody write.

``errors_disks.py DISK FOLDER CASES``, as errors_saves.py; DISK is a mounted tmpfs.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mpickpt.storage.lease import Lease
from tests.crash.programs.injection import Fault, injected
from tests.faults.programs.errors_cases import Moments, Said, run_case, say
from tests.faults.programs.errors_modes import (
    COMM,
    MODES,
    AtOnce,
    Managed,
    fresh_copies,
    name_files_alike,
)

BEAT_S = 0.02
KIB = 1024


def fill(disk: Path, left_kib: int) -> None:
    """Take all room of the disk but this."""
    found = os.statvfs(disk)
    nbytes = found.f_bavail * found.f_frsize - left_kib * KIB
    with (disk / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def take_inodes(disk: Path, left: int) -> None:
    """Take all inodes of the disk but so many."""
    (disk / "fillers").mkdir()
    for number in range(os.statvfs(disk).f_favail - left):
        (disk / "fillers" / str(number)).touch()


def remount(disk: Path, how: str) -> None:
    """Remount the disk, as somebody else does who finds it broken."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


class Trouble:
    """What befalls the disk in a case, and how it is mended.

    Parameters
    ----------
    case : dict
        ``trouble``, its ``amount``, the ``moment``, the ``rank``.
    """

    def __init__(self, case: Said, disk: Path, run: Path, mode: AtOnce) -> None:
        self.disk, self.run = disk, run
        self.step = run / f"step-{mode.new[0]:010d}"
        self.amount = case.get("amount", 0)
        self.begin: Callable[[], None] = getattr(
            self, case["trouble"].replace("-", "_")
        )
        self.mends: list[Callable[[], None]] = []

    def mend(self) -> None:
        """Make the disk good again."""
        for mend in self.mends:
            mend()

    def disk_fills(self) -> None:
        fill(self.disk, self.amount)
        self.mends.append((self.disk / "filler").unlink)

    def no_inodes(self) -> None:
        take_inodes(self.disk, self.amount)
        fillers = self.disk / "fillers"
        self.mends += [path.unlink for path in fillers.iterdir()]
        self.mends.append(fillers.rmdir)

    def read_only(self) -> None:
        remount(self.disk, "ro")
        self.mends.append(lambda: remount(self.disk, "rw"))

    def run_directory_closed(self) -> None:
        self._close(self.run)

    def step_directory_closed(self) -> None:
        self._close(self.step)

    def other_user(self) -> None:
        os.seteuid(65534)
        self.mends.append(lambda: os.seteuid(0))

    def too_many_files(self) -> None:
        self._limit(resource.RLIMIT_NOFILE, _lowest_free_descriptor())

    def file_size(self) -> None:
        self._limit(resource.RLIMIT_FSIZE, self.amount * KIB)

    def _close(self, directory: Path) -> None:
        directory.chmod(0o555)
        self.mends.append(lambda: directory.exists() and directory.chmod(0o755))

    def _limit(self, which: int, value: int) -> None:
        before = resource.getrlimit(which)
        resource.setrlimit(which, (value, before[1]))
        self.mends.append(lambda: resource.setrlimit(which, before))


def _lowest_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


@contextlib.contextmanager
def befalling(case: Said, trouble: Trouble, moments: Moments) -> Iterator[list[str]]:
    """Let the trouble come at the case's moment; limits end with the save."""
    hits: list[str] = []

    def befall() -> None:
        if not hits:
            hits.append(case["trouble"])
            trouble.begin()

    if case["rank"] == COMM.rank:
        if case["moment"] == "before":
            befall()
        else:
            moments.at(case["moment"], befall)
    yield hits
    moments.at(None)
    if case["trouble"] in ("too-many-files", "file-size", "other-user"):
        trouble.mend()
        trouble.mends.clear()


class Beating(Managed):
    """A manager whose lease beats fast, and tells afterwards whether it still does."""

    def begin(self, run: Path) -> None:
        Lease.acquire.__func__.__kwdefaults__["beat_s"] = BEAT_S  # type: ignore[attr-defined]
        super().begin(run)
        self.step = 3
        self.manager.save(3, wait=True)
        self.step = 2

    def save(self) -> None:
        time.sleep(10 * BEAT_S)
        self.step = 5
        self.manager.save(5, wait=True)
        time.sleep(10 * BEAT_S)

    def again(self) -> None:
        if COMM.rank == 0:
            self.require_beat()
        self.step = 6
        self.manager.save(6, wait=True)

    def require_beat(self) -> None:
        """Fail unless the file of the lease changes again."""
        (lease,) = (self.run / ".mpickpt" / "lease").iterdir()
        before, end = lease.read_bytes(), time.monotonic() + 100 * BEAT_S
        while lease.read_bytes() == before:
            assert time.monotonic() < end, "the lease beats no more"
            time.sleep(BEAT_S)


Beating.old, Beating.new, Beating.last = (3, 3), (5, 5), (6, 6)  # type: ignore[assignment]


@contextlib.contextmanager
def beat_failing(case: Said, run: Path) -> Iterator[list[str]]:
    """Fail calls on the file of the lease, all of them."""
    hits: list[str] = []
    if COMM.rank:
        yield hits
        return
    path = str(run / ".mpickpt" / "lease" / "0000000001.json")
    with injected(Fault(rank=0, inject=case["inject"], path=path)) as seen:
        yield hits
    hits += seen


def main() -> None:
    disk, folder, cases = map(Path, sys.argv[1:4])
    restart_names = name_files_alike()
    moments = Moments()
    modes = {mode.name: mode for mode in (*MODES, Beating("beat", wait=True))}
    copies = {}
    for case in json.loads(cases.read_text()):
        mode = modes[case["mode"]]
        if mode.name not in copies:
            copies[mode.name] = fresh_copies(mode, disk / mode.name)
        run = next(copies[mode.name])
        restart_names()
        say(folder, {"case": case["name"], "begins": True})
        if mode.name == "beat":
            said = run_case(mode, run, beat_failing(case, run))
        else:
            trouble = Trouble(case, disk, run, mode)
            said = run_case(mode, run, befalling(case, trouble, moments), trouble.mend)
        gathered = COMM.gather(said)
        say(folder, {"case": case["name"], "run": str(run), "ranks": gathered})


main()
