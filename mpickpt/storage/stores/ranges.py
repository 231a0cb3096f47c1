"""Keeps how far a range of a file was read, over the tries that it takes."""

from collections.abc import Callable

# A cut connection loses a chunk at most.
CHUNK_NBYTES = 1 << 16


class Filling:
    """Bytes that are read into a buffer; what has come is not asked for again.

    Parameters
    ----------
    view : memoryview
        The buffer, in bytes.
    offset : int
        Of its first byte in the file.
    """

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view.cast("B")
        self._offset = offset
        self.done = 0

    @property
    def start(self) -> int:
        """The first byte that is wanted, in the file."""
        return self._offset + self.done

    @property
    def stop(self) -> int:
        """One after the last byte that is wanted."""
        return self._offset + len(self._view)

    @property
    def header(self) -> str:
        """The value of the HTTP header that asks for what is missing."""
        return f"bytes={self.start}-{self.stop - 1}"

    def take(self, content: bytes) -> None:
        """Add what has come."""
        end = self.done + len(content)
        self._view[self.done : end] = content
        self.done = end

    def take_from(self, read: Callable[[int], bytes]) -> None:
        """Add what a stream gives, until it ends or no more is wanted."""
        while self.start < self.stop:
            content = read(min(CHUNK_NBYTES, self.stop - self.start))
            if not content:
                return
            self.take(content)
