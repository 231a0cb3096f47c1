"""Keeps a sparse file in memory as the runs that were written; touches nothing."""

from bisect import bisect_left, insort


class MemoryFile:
    """A file-like object that remembers which bytes were written, and no others.

    HDF5's driver for Python objects writes a shard's metadata through it. A file in
    /dev/shm or a memfd has holes for nothing too, but HDF5 2 refuses the path of a
    memfd, /dev/shm may be full, and RLIMIT_FSIZE counts holes.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._position = 0
        # Disjoint runs: their offsets in order, and their bytes by offset.
        self._starts: list[int] = []
        self._runs: dict[int, bytes] = {}

    def runs(self) -> tuple[tuple[int, bytes], ...]:
        """Return offset and bytes of what was written, ascending, gaps between."""
        joined: list[tuple[int, list[bytes]]] = []
        end = -1
        for start in self._starts:
            if start != end:
                joined.append((start, []))
            joined[-1][1].append(self._runs[start])
            end = start + len(self._runs[start])
        return tuple((start, b"".join(pieces)) for start, pieces in joined)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to an offset, as of io.IOBase."""
        origin = (0, self._position, self.nbytes)[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        """Return the position, as of io.IOBase."""
        return self._position

    def write(self, view: memoryview) -> int:
        """Write at the position and move on, as of io.RawIOBase."""
        start, content = self._position, bytes(view)
        if len(self._runs.get(start, b"")) == len(content):
            self._runs[start] = content
        else:
            self._erase(start, start + len(content))
            self._keep(start, content)
        self._position += len(content)
        self.nbytes = max(self.nbytes, self._position)
        return len(content)

    def readinto(self, view: memoryview) -> int:
        """Read from the position and move on, as of io.RawIOBase; gaps are zero."""
        start = self._position
        stop = start + len(view)
        view[:] = bytes(len(view))
        for run_start in self._overlapping(start, stop):
            run = self._runs[run_start][max(0, start - run_start) : stop - run_start]
            at = max(0, run_start - start)
            view[at : at + len(run)] = run
        self._position = stop
        return len(view)

    def truncate(self, size: int) -> int:
        """Set the size of the file, as of io.RawIOBase."""
        self._erase(size, max(size, self.nbytes))
        self.nbytes = size
        return size

    def flush(self) -> None:
        """Do nothing, as of io.IOBase."""

    def _overlapping(self, start: int, stop: int) -> list[int]:
        first = bisect_left(self._starts, start)
        if first and self._end(self._starts[first - 1]) > start:
            first -= 1
        return self._starts[first : bisect_left(self._starts, stop)]

    def _erase(self, start: int, stop: int) -> None:
        for run_start in self._overlapping(start, stop):
            run = self._runs.pop(run_start)
            self._starts.remove(run_start)
            if run_start < start:
                self._keep(run_start, run[: start - run_start])
            if run_start + len(run) > stop:
                self._keep(stop, run[stop - run_start :])

    def _keep(self, start: int, content: bytes) -> None:
        insort(self._starts, start)
        self._runs[start] = content

    def _end(self, run_start: int) -> int:
        return run_start + len(self._runs[run_start])
