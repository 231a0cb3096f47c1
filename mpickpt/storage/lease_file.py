"""Reads the files of the leases of a run; see `storage.lease`."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mpickpt.format.naming import LEASE_DIRECTORY, lease_name, parse_lease_name
from mpickpt.storage.job_identity import JobIdentity
from mpickpt.storage.small_file import content_of, control_names_in


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file of a lease says: who holds it, and a counter that beats."""

    job: str
    restart_count: int
    host: str
    machine: str
    pid: int
    started: int
    beat_s: float
    beat: str
    state: str

    @property
    def identity(self) -> JobIdentity:
        """The holder."""
        return JobIdentity(
            job=self.job,
            restart_count=self.restart_count,
            host=self.host,
            machine=self.machine,
            pid=self.pid,
            started=self.started,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The newest file of a lease, as it was read; no record where it is damaged."""

    generation: int
    path: Path
    content: bytes | None
    record: LeaseRecord | None


def newest_claim(run_dir: Path) -> Claim | None:
    """Return the lease of a run that was taken last, None where none ever was."""
    # A server that lists bit by bit may miss both the newest and the one that it
    # replaced just then: numbers would begin anew.
    numbers = generations(run_dir) or generations(run_dir)
    if not numbers:
        return None
    path = run_dir / LEASE_DIRECTORY / lease_name(numbers[-1])
    content = content_of(path)
    record = None
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
        record = msgspec.json.decode(content or b"", type=LeaseRecord)
    return Claim(generation=numbers[-1], path=path, content=content, record=record)


def generations(run_dir: Path) -> list[int]:
    """Return the numbers of the leases of a run, the one that holds last."""
    numbers = map(parse_lease_name, control_names_in(run_dir / LEASE_DIRECTORY))
    return sorted(number for number in numbers if number is not None)
