"""Tells who this process is to other jobs, and whether another one still lives."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """Who writes in a run directory.

    Attributes
    ----------
    job : str
        Name of the job, the same after it was requeued; outside Slurm a name that
        no other process has.
    restart_count : int
        How often Slurm requeued the job.
    host : str
        Where the process runs.
    machine : str
        Tells boots and process namespaces apart: process ids mean something only
        where it is equal. Empty where that is not known.
    pid : int
        Id of the process.
    started : int
        When the process was started, in clock ticks since boot.
    """

    job: str
    restart_count: int
    host: str
    machine: str
    pid: int
    started: int

    @classmethod
    def current(cls, environ: Mapping[str, str] | None = None) -> "JobIdentity":
        """Return the identity of this process."""
        settings = os.environ if environ is None else environ
        pid, host = os.getpid(), socket.gethostname()
        started = _start_of(pid) or 0
        restarts = settings.get("SLURM_RESTART_COUNT", "")
        return cls(
            job=_slurm_job(settings) or f"process-{host}-{pid}-{started}",
            restart_count=int(restarts) if restarts.isdecimal() else 0,
            host=host,
            machine=_machine(),
            pid=pid,
            started=started,
        )

    def is_later_start_of(self, other: "JobIdentity") -> bool:
        """Tell whether this is the same job, requeued since."""
        return self.job == other.job and self.restart_count > other.restart_count

    def is_known_dead(self) -> bool:
        """Tell whether this process is certainly gone, as seen from here."""
        if not self.machine or self.machine != _machine():
            return False
        return _start_of(self.pid) != self.started


def _slurm_job(settings: Mapping[str, str]) -> str | None:
    number = settings.get("SLURM_JOB_ID")
    if not number:
        return None
    if "SLURM_ARRAY_JOB_ID" in settings and "SLURM_ARRAY_TASK_ID" in settings:
        number = f"{settings['SLURM_ARRAY_JOB_ID']}_{settings['SLURM_ARRAY_TASK_ID']}"
    # Two clusters that share a file system count their jobs alike.
    words = ("slurm", settings.get("SLURM_CLUSTER_NAME"), number)
    return "-".join(word for word in words if word)


def _machine() -> str:
    try:
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """Return when a process was started, None where it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # Fields 3 and 22 of proc(5), counted after the name, which may hold spaces. A
    # zombie runs no more: it waits for its parent to ask how it ended.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
