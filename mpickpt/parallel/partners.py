"""Has a rank of another node keep once more what this one has written."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mpickpt.parallel.conversation import Conversation
from mpickpt.parallel.ferry import PIECE_NBYTES, Activity, Buffer, Ferry
from mpickpt.parallel.ground import WrittenFile
from mpickpt.parallel.waiting import Steps
from mpickpt.storage.incoming_file import IncomingFile
from mpickpt.storage.shard_file import open_shard_file
from mpickpt.storage.staging import yield_cpu

PHASE = "copy to partners"

_TAG = 1  # of a conversation on which saves alone send files
_MOST_FILES = 2  # shard and layout file

Fill = Callable[[memoryview, int], None]


class ComingFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of a file before it sends it.

    Attributes
    ----------
    path : str
        Relative to the checkpoint's directory.
    nbytes : int
        Size.
    sha256 : str
        Digest of the whole file, hex.
    """

    path: str
    nbytes: int
    sha256: str


Coming = Mapping[int, ComingFile]

_FILES = msgspec.msgpack.Decoder(list[ComingFile])


def announce_copies(
    talk: Conversation, target: int, files: Sequence[WrittenFile]
) -> Steps[Coming]:
    """Tell the target what is going to come; return what is told here.

    Parameters
    ----------
    talk : Conversation
        The ranks.
    target : int
        Rank of another node.
    files : sequence of WrittenFile
        The shard of this rank, and the layout file where it has written that.

    Returns
    -------
    mapping of int to ComingFile
        By the number of the passage that it takes.
    """
    told = [
        ComingFile(path=file.name, nbytes=file.nbytes, sha256=file.sha256)
        for file in files
    ]
    heard = yield from talk.exchange({target: msgspec.msgpack.encode(told)}, PHASE)
    return {
        _passage(source, number): file
        for source, message in heard.items()
        for number, file in enumerate(_FILES.decode(message))
    }


def move_copies(
    talk: Conversation,
    directory: Path,
    target: int,
    files: Sequence[WrittenFile],
    coming: Coming,
) -> Steps[None]:
    """Send the files of this rank, and write those that come.

    Parameters
    ----------
    talk, target, files
        As in `announce_copies`.
    directory : Path
        Of the checkpoint, on this rank's node.
    coming : mapping of int to ComingFile
        What was told.

    Raises
    ------
    CorruptShardError
        What came has another digest than what was written.
    StorageError
        The disk of some node refuses.

    Notes
    -----
    Collective. The copies are durable under their names when it returns. Takes about
    32 MiB, however many bytes are moved.
    """
    ferry = Ferry(talk, _TAG)
    porter = _Porter(
        ferry=ferry,
        activity=Activity(ferry),
        rank=talk.rank,
        directory=directory,
        target=target,
        files=files,
        coming=coming,
    )
    work = talk.work(porter.carry, PHASE, moved=porter.activity.moved)
    yield from ferry.around(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Porter:
    """Reads and writes files in threads while a ferry carries their pieces."""

    ferry: Ferry
    activity: Activity
    rank: int
    directory: Path
    target: int
    files: Sequence[WrittenFile]
    coming: Coming

    def carry(self, cancelled: threading.Event) -> None:
        """Send and receive all that goes from and to this rank."""
        failures: list[BaseException] = []

        def run(call: Callable[[threading.Event], None]) -> None:
            try:
                if any(file.image is not None for file in self.files):
                    yield_cpu()  # the program goes on meanwhile
                call(cancelled)
            except BaseException as failure:
                failures.append(failure)
                cancelled.set()  # so that the other thread ends too

        sending = threading.Thread(
            target=run, args=(self._send_all,), name="mpickpt-send", daemon=True
        )
        sending.start()
        run(self._receive_all)
        sending.join()
        if failures:
            raise failures[0]

    def _send_all(self, cancelled: threading.Event) -> None:
        for number, file in enumerate(self.files):
            if file.image is not None:
                self._send(number, file, _from_memory(file.image), cancelled)
                continue
            path = self.directory / file.name
            with open_shard_file(path, nbytes=file.nbytes, direct=False) as opened:
                self._send(number, file, opened.read_at, cancelled)

    def _send(
        self, number: int, file: WrittenFile, fill: Fill, cancelled: threading.Event
    ) -> None:
        passage = _passage(self.rank, number)
        buffer: Buffer
        for offset in range(0, file.nbytes, PIECE_NBYTES):
            nbytes = min(PIECE_NBYTES, file.nbytes - offset)
            buffer = self.ferry.buffer(cancelled)
            with self.activity:
                fill(self.ferry.room_in(buffer, nbytes), offset)
            self.ferry.ship(buffer, self.target, passage, offset, nbytes)
        buffer = self.ferry.buffer(cancelled)
        self.ferry.ship_end(buffer, self.target, passage, None)

    def _receive_all(self, cancelled: threading.Event) -> None:
        missing = set(self.coming)
        arriving: dict[int, IncomingFile] = {}
        try:
            while missing:
                piece = self.ferry.next_piece(cancelled)
                number = piece.passage
                with self.activity:
                    if number not in arriving:
                        file = IncomingFile(self.directory, self.coming[number])
                        arriving[number] = file
                    if piece.is_last:
                        arriving.pop(number).finish()
                        missing.remove(number)
                    else:
                        arriving[number].take(piece.offset, piece.content)
                self.ferry.give_back(piece)
        finally:
            for file in arriving.values():
                file.abandon()


def _from_memory(image: memoryview) -> Fill:
    def fill(view: memoryview, offset: int) -> None:
        view[:] = image[offset : offset + len(view)]

    return fill


def _passage(source: int, number: int) -> int:
    """Return a number of the passage of a file that no other one has."""
    return source * _MOST_FILES + number
