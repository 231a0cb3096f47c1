"""Reads and writes the files that one rank sends and gets; threads, but no MPI."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpickpt.errors import CheckpointError, StorageError
from mpickpt.parallel.ferry import PIECE_NBYTES, Activity, Ferry
from mpickpt.planning.sources import FileRecord, Passage
from mpickpt.storage.copy_target import CopyControl
from mpickpt.storage.copy_to_directory import DirectoryTarget
from mpickpt.storage.incoming_file import IncomingFile
from mpickpt.storage.places import Place
from mpickpt.storage.shard_file import open_shard_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Porter:
    """Reads and writes the files of one rank while a ferry carries their pieces."""

    ferry: Ferry
    activity: Activity
    directory: Path
    passages: Sequence[Passage]
    files: Sequence[FileRecord]
    rank: int

    def carry(self, cancelled: threading.Event) -> dict[int, str]:
        """Send and receive all that goes from and to this rank.

        Returns
        -------
        dict of int to str
            Passages to this rank whose source failed, each with the reason.

        Raises
        ------
        StorageError
            The disk of this node refuses what comes.
        """
        failures: list[BaseException] = []

        def send() -> None:
            try:
                self._send_all(cancelled)
            except BaseException as failure:
                failures.append(failure)

        sending = threading.Thread(target=send, name="mpickpt-send", daemon=True)
        sending.start()
        failed = self._receive_all(cancelled)
        sending.join()
        if failures:
            raise failures[0]
        return failed

    def _send_all(self, cancelled: threading.Event) -> None:
        for number, passage in enumerate(self.passages):
            if passage.sender == self.rank:
                failure = self._send(number, passage, cancelled)
                buffer = self.ferry.buffer(cancelled)
                self.ferry.ship_end(buffer, passage.dest, number, failure)

    def _send(
        self, number: int, passage: Passage, cancelled: threading.Event
    ) -> str | None:
        """Send a file; return what is wrong with it. Who receives it verifies it."""
        record = self.files[passage.file]
        path = self.directory / record.path
        try:
            with open_shard_file(path, nbytes=record.nbytes, direct=False) as file:
                for offset in range(0, record.nbytes, PIECE_NBYTES):
                    nbytes = min(PIECE_NBYTES, record.nbytes - offset)
                    buffer = self.ferry.buffer(cancelled)
                    with self.activity:
                        file.read_at(self.ferry.room_in(buffer, nbytes), offset)
                    self.ferry.ship(buffer, passage.dest, number, offset, nbytes)
        except CheckpointError as error:
            if cancelled.is_set():
                raise
            return error.message
        return None

    def _receive_all(self, cancelled: threading.Event) -> dict[int, str]:
        coming = {
            number
            for number, passage in enumerate(self.passages)
            if passage.dest == self.rank and passage.sender is not None
        }
        arriving: dict[int, IncomingFile] = {}
        failed: dict[int, str] = {}
        try:
            while coming:
                piece = self.ferry.next_piece(cancelled)
                number = piece.passage
                with self.activity:
                    if not piece.is_last:
                        if number not in arriving:
                            record = self.files[self.passages[number].file]
                            arriving[number] = IncomingFile(self.directory, record)
                        arriving[number].take(piece.offset, piece.content)
                    else:
                        coming.remove(number)
                        reason = _ended(arriving.pop(number, None), piece.failure)
                        failed |= {} if reason is None else {number: reason}
                self.ferry.give_back(piece)
        finally:
            for file in arriving.values():
                file.abandon()
        return failed


def _ended(file: IncomingFile | None, failure: str | None) -> str | None:
    """Conclude a file that came; return what is wrong with its source."""
    if file is None or failure is not None:
        if file is not None:
            file.abandon()
        return failure or "nothing came"
    try:
        file.finish()
    except StorageError:
        raise
    except CheckpointError as error:
        return error.message
    return None


@dataclass(slots=True, kw_only=True)
class Copier:
    """Copies the files of one rank from further tiers."""

    directory: Path
    tiers: Sequence[Place]
    passages: Sequence[Passage]
    files: Sequence[FileRecord]
    rank: int
    nbytes: int = 0

    def copy(self, cancelled: threading.Event) -> dict[int, str]:
        """Copy all that comes to this rank; otherwise as `Porter.carry`."""
        control = CopyControl(cancelled=cancelled, progress=self._moved)
        target = DirectoryTarget(self.directory)
        failed = {}
        for number, passage in enumerate(self.passages):
            if passage.dest == self.rank and passage.tier is not None:
                source = self.tiers[passage.tier]
                try:
                    target.take(self.files[passage.file], source, control, replace=True)
                except CheckpointError as error:
                    if cancelled.is_set() or self._is_of_own_disk(error):
                        raise
                    failed[number] = error.message
        return failed

    def _moved(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def _is_of_own_disk(self, error: CheckpointError) -> bool:
        own = f"{self.directory}/"
        return isinstance(error, StorageError) and str(error.path or "").startswith(own)
