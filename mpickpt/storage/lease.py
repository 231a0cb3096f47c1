"""Holds the right to write in a run directory; one process, files only.

Each taking of the lease is a file of its own, numbered, created by `O_EXCL`: of
several takers one wins, and the highest number holds. The holder counts up in its
file; whoever wants the lease watches that count on a clock of its own, so no two
clocks are ever compared. A holder that lost the lease never writes in the file of
another, so a process that was stopped and goes on cannot take it back unawares.
"""

import errno
import json
import logging
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpickpt.errors import LeaseHeldError, StorageError
from mpickpt.format.naming import LEASE_DIRECTORY, lease_name
from mpickpt.storage.catalog import PathLike
from mpickpt.storage.commit import (
    close_file,
    create_file,
    discard,
    storage_errors,
    sync_directory,
    sync_file,
)
from mpickpt.storage.job_identity import JobIdentity
from mpickpt.storage.lease_file import Claim, generations, newest_claim
from mpickpt.storage.small_file import content_of, make_control_directory

__all__ = ["JobIdentity", "Lease", "is_written_by_another"]

log = logging.getLogger(__name__)

BEATS = 3
LOOKS_PER_BEAT = 4
_LONGEST_BEAT_S = 60.0


class Lease:
    """The right to write in a run directory, until `release`.

    Notes
    -----
    A daemon thread counts, so that others see that the holder lives. Use it as a
    context manager, or call `release`; the lease of a process that died can be taken
    over.
    """

    def __init__(
        self, run_dir: Path, generation: int, identity: JobIdentity, beat_s: float
    ) -> None:
        self.run_dir = run_dir
        self.generation = generation
        self.identity = identity
        self._path = run_dir / LEASE_DIRECTORY / lease_name(generation)
        self._beat_s = beat_s
        self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="mpickpt-lease", daemon=True
        )

    @classmethod
    def acquire(
        cls,
        run_dir: PathLike,
        identity: JobIdentity | None = None,
        *,
        beat_s: float = 2.0,
        patience_s: float = 0.0,
    ) -> "Lease":
        """Take the lease of a run directory, which is made if need be.

        Parameters
        ----------
        run_dir : path-like
            The run directory.
        identity : JobIdentity, optional
            By default that of this process.
        beat_s : float
            Time between two beats of this holder.
        patience_s : float
            How long to wait for a living holder to release it: a command that
            removes checkpoints is soon done.

        Raises
        ------
        LeaseHeldError
            Another job holds it and lives.
        StorageError
            If the file system refuses.

        Notes
        -----
        Not collective. Returns at once where the lease is free, where the holder is
        an earlier start of the same job, or a process of this host that is gone.
        Else it watches the holder for three beats, and takes over from one that is
        still. A holder that is only slow is told by `require` that it lost the lease.
        """
        run_path = Path(run_dir)
        identity = identity or JobIdentity.current()
        make_control_directory(run_path / LEASE_DIRECTORY)
        deadline = time.monotonic() + patience_s
        while True:
            claim = newest_claim(run_path)
            if claim is not None and _is_alive(claim, identity, beat_s):
                _refuse_if_held(run_path, claim, deadline)
                continue
            lease = cls(run_path, _next(claim), identity, beat_s)
            if lease._take():
                return lease

    def require(self) -> None:
        """Make sure that this process still holds the lease.

        Raises
        ------
        LeaseHeldError
            Another job took it over, for this process seemed dead, or it is gone.
        StorageError
            If the file system refuses.

        Notes
        -----
        To be called before each publish and each delete. Thread-safe.
        """
        claim = newest_claim(self.run_dir)
        if self._is_own(claim):
            return
        self._ended.set()
        if claim is None:
            raise LeaseHeldError(
                f"{self._path} is gone: somebody removed it, so whether another job "
                f"writes in {self.run_dir} is not known",
                path=str(self.run_dir),
            )
        raise _held(self.run_dir, claim, "was taken over by")

    def release(self) -> None:
        """Give the lease back; what cannot be written is logged.

        Notes
        -----
        Without it the next job would have to see that this one is still.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            if self._is_own(newest_claim(self.run_dir)):
                self._write("free")
        except StorageError as error:
            log.warning("the lease of %s was not given back: %s", self.run_dir, error)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()

    def _take(self) -> bool:
        try:
            descriptor = create_file(self._path)
        except StorageError as error:
            if error.errno == errno.EEXIST:
                return False
            raise
        try:
            self._write_first(descriptor)
            # A taker that slept may have won a number that was used up meanwhile.
            if generations(self.run_dir)[-1:] != [self.generation]:
                self._leave()
                return False
            for older in generations(self.run_dir)[:-1]:
                discard(self._path.with_name(lease_name(older)))
            sync_directory(self._path.parent)
        except BaseException:
            self._leave()  # else it would pass for a holder's that lives
            raise
        return True

    def _write_first(self, descriptor: int) -> None:
        try:
            with storage_errors("write", self._path):
                os.write(descriptor, self._text("held"))
            # A busy server takes many beats to sync: others must see this one live.
            self._thread.start()
            sync_file(descriptor, self._path)
        finally:
            close_file(descriptor, self._path)

    def _leave(self) -> None:
        self._ended.set()
        discard(self._path)

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            self._count += 1
            try:
                if not self._is_own(newest_claim(self.run_dir)):
                    return  # taken over: `require` tells
                self._write("held")
            except StorageError as error:
                if error.errno == errno.ENOENT:
                    return
                log.warning("the lease of %s does not beat: %s", self.run_dir, error)

    def _is_own(self, claim: Claim | None) -> bool:
        if claim is None or claim.generation != self.generation:
            return False
        # Numbers begin anew where somebody removed all files.
        return claim.record is None or claim.record.identity == self.identity

    def _write(self, state: str) -> None:
        """Write over the file in place.

        Not by a rename: network file systems look at an open file anew, but remember
        for half a minute which file a name stood for.
        """
        with storage_errors("write", self._path):
            flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags)
            try:
                os.pwrite(descriptor, self._text(state), 0)
            finally:
                os.close(descriptor)

    def _text(self, state: str) -> bytes:
        """Return the content of the file, of one length for every beat and state."""
        document: dict[str, Any] = asdict(self.identity)
        document |= {
            "beat": f"{self._count:012d}",
            "beat_s": self._beat_s,
            "state": state,
        }
        return json.dumps(document, sort_keys=True).encode() + b"\n"


def is_written_by_another(run_dir: Path, *, beat_s: float = 2.0) -> bool:
    """Tell whether another job that lives holds the lease; changes nothing.

    Notes
    -----
    Returns at once where `Lease.acquire` would take the lease at once; else it
    watches the holder until it beats, for three beats at most.
    """
    claim = newest_claim(run_dir)
    return claim is not None and _is_alive(claim, JobIdentity.current(), beat_s)


def _next(claim: Claim | None) -> int:
    return 1 if claim is None else claim.generation + 1


def _is_alive(claim: Claim, identity: JobIdentity, beat_s: float) -> bool:
    """Tell whether somebody holds the lease; watch for three beats to know it."""
    holder = claim.record
    if holder is not None:
        if (
            holder.state == "free"
            or identity.is_later_start_of(holder.identity)
            or holder.identity.is_known_dead()
        ):
            return False
        beat_s = max(beat_s, min(holder.beat_s, _LONGEST_BEAT_S))
    # Looks count, not seconds: where machine or server stand still, they do for both.
    for _ in range(BEATS * LOOKS_PER_BEAT):
        time.sleep(beat_s / LOOKS_PER_BEAT)
        if content_of(claim.path) != claim.content:
            return True
    return False


def _refuse_if_held(run_dir: Path, seen: Claim, deadline: float) -> None:
    claim = newest_claim(run_dir)
    if claim is None or claim.generation != seen.generation or claim.record is None:
        return
    if claim.record.state == "held" and time.monotonic() >= deadline:
        raise _held(run_dir, claim, "is written by")


def _held(run_dir: Path, claim: Claim, how: str) -> LeaseHeldError:
    holder = claim.record
    if holder is None:
        return LeaseHeldError(f"{run_dir} {how} another job", path=str(run_dir))
    return LeaseHeldError(
        f"{run_dir} {how} job {holder.job} (restart {holder.restart_count}, process "
        f"{holder.pid} on {holder.host}); a run directory has one writer: wait until "
        "that job ends, stop it, or use another run directory",
        path=str(run_dir),
        job=holder.job,
        node=holder.host,
        pid=holder.pid,
    )
