"""Divides a file into parts, reads them and has them sent; reads that file alone.

One buffer feeds both digests: the SHA-256 of the whole file, which must be that of the
manifest, and those of the part, which the store checks. So what the store has accepted
is what the manifest says, and no byte is read twice.
"""

import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

from mpickpt.errors import CorruptShardError, IncompleteCheckpointError
from mpickpt.storage.commit import storage_errors
from mpickpt.storage.stores.failures import Cancellation, raise_if_cancelled
from mpickpt.storage.stores.store import Pace, Progress

T = TypeVar("T")

_ROUND_NBYTES = 1 << 20
_PACE_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A range of a file. Parts are counted from 1."""

    number: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartContent:
    """The bytes of a part and their SHA-256, 32 bytes."""

    part: Part
    content: bytes
    sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One upload: what `Store.upload` was given, and where it goes.

    Attributes
    ----------
    url : str
        The file in the store.
    cancelled : Cancellation
        Also stops the parts under way when one of them has failed.
    """

    url: str
    source: Path
    nbytes: int
    sha256: str
    pace: Pace | None
    cancelled: Cancellation
    progress: Progress | None

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes may be sent."""
        for start in range(0, nbytes if self.pace else 0, _PACE_NBYTES):
            raise_if_cancelled("upload", self.url, self.cancelled)
            if self.pace is not None:
                self.pace.take(min(_PACE_NBYTES, nbytes - start))

    def tell(self, nbytes: int) -> None:
        """Report that the store has so many more bytes."""
        if self.progress is not None:
            self.progress(nbytes)


def plan_parts(nbytes: int, part_nbytes: int, most: int) -> tuple[Part, ...]:
    """Return the parts of a file, the same ones for the same arguments.

    Parameters
    ----------
    nbytes : int
        Size of the file; an empty one has one empty part.
    part_nbytes : int
        Size of each part but the last.
    most : int
        The store takes no more; parts are larger then, by whole MiB.
    """
    if nbytes > most * part_nbytes:
        part_nbytes = -(-nbytes // (most * _ROUND_NBYTES)) * _ROUND_NBYTES
    offsets = range(0, nbytes, part_nbytes) or (0,)
    return tuple(
        Part(number=number, offset=offset, nbytes=min(part_nbytes, nbytes - offset))
        for number, offset in enumerate(offsets, start=1)
    )


def read_parts(sending: Sending, parts: Sequence[Part]) -> Iterator[PartContent]:
    """Yield the parts of the source in order; end normally if all of it is right.

    Raises
    ------
    CorruptShardError
        After the last part, if the digest of all of them is another one.
    IncompleteCheckpointError
        If the source has another size.
    """
    source, whole = sending.source, hashlib.sha256()
    with storage_errors("read", source), open(source, "rb", buffering=0) as file:
        _check_size(file.seek(0, 2), sending)
        file.seek(0)
        for part in parts:
            content = _read_exactly(file, part.nbytes)
            if len(content) != part.nbytes:
                _check_size(part.offset + len(content), sending)
            whole.update(content)
            digest = hashlib.sha256(content).digest()
            yield PartContent(part=part, content=content, sha256=digest)
    if whole.hexdigest() != sending.sha256:
        raise CorruptShardError(
            f"{source} has SHA-256 {whole.hexdigest()}, the manifest says "
            f"{sending.sha256}: it was damaged after it was saved, so it is not copied",
            path=str(source),
            expected=sending.sha256,
            actual=whole.hexdigest(),
        )


def send_parts(
    sending: Sending,
    parts: Sequence[Part],
    send: Callable[[PartContent], T],
    *,
    in_flight: int,
    observe: Callable[[bytes], object] | None = None,
) -> list[T]:
    """Send all parts, several at once, and return what `send` returned, in order.

    Parameters
    ----------
    send : callable
        Sends one part, on another thread; ends soon when the sending is cancelled.
    in_flight : int
        Parts that are sent at once.
    observe : callable, optional
        Is shown the bytes of all parts, in order.

    Raises
    ------
    CheckpointError
        The source is not what it should be, or a part could not be sent; the others
        have ended.
    """
    done: list[T] = []
    under_way: deque[tuple[Part, Future[T]]] = deque()

    def finish_one() -> None:
        part, future = under_way.popleft()
        done.append(future.result())
        sending.tell(part.nbytes)

    with _threads(in_flight, sending.cancelled) as pool:
        for content in read_parts(sending, parts):
            raise_if_cancelled("upload", sending.url, sending.cancelled)
            if observe is not None:
                observe(content.content)
            under_way.append((content.part, pool.submit(send, content)))
            while len(under_way) >= in_flight:
                finish_one()
        while under_way:
            finish_one()
    return done


@contextlib.contextmanager
def _threads(n_threads: int, cancelled: Cancellation) -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(n_threads, thread_name_prefix="mpickpt-upload")
    try:
        yield pool
    except BaseException:
        cancelled.stop()
        raise
    finally:
        # What is under way ends by its time-outs at the latest.
        pool.shutdown(cancel_futures=True)
        cancelled.restart()


def _read_exactly(file: FileIO, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    view, done = memoryview(content), 0
    while done < nbytes:
        n = file.readinto(view[done:])
        if not n:
            break
        done += n
    return bytes(content[:done])


def _check_size(actual: int, sending: Sending) -> None:
    if actual != sending.nbytes:
        raise IncompleteCheckpointError(
            f"{sending.source} has {actual} bytes, the manifest says {sending.nbytes}",
            path=str(sending.source),
            expected=sending.nbytes,
            actual=actual,
        )
