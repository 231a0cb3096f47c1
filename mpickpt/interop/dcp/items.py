"""Reads what lies in the items of a DCP checkpoint's files; no MPI, no torch."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mpickpt.errors import ManifestError
from mpickpt.format.dtypes import dtype_name, parse_dtype
from mpickpt.format.tree import ListNode, Node
from mpickpt.interop.sources.file import SourceFile
from mpickpt.interop.sources.plain_objects import PLAIN_OBJECTS, NodeMaker
from mpickpt.interop.sources.torch_file import StoredTensor, TorchFile, read_head
from mpickpt.interop.sources.tree import SourceArray, SourceChunk, SourceItem
from mpickpt.state import Shape, StreamedArray

# A chunk from this size on is looked at before the save, for it may have to be cut.
_LARGE_NBYTES = 16 << 20


def pieces_of(
    directory: Path, array: SourceArray, chunk: SourceChunk
) -> list[tuple[Shape, Any]]:
    """Return the boxes that make up a chunk: offset in the array, and elements.

    It is one box, unless the chunk is large and its elements lie in another order than
    the array's: cut in boxes that are few bytes apart, it is never in memory as one.
    """
    stream = ItemStream(directory, array, chunk)
    if chunk.runs:
        runs = _Runs(stream, chunk)
        return [(r.offset, _RunStream(runs, n)) for n, r in enumerate(chunk.runs)]
    # Of a box without elements nothing will be read, so it is looked at now as well.
    if chunk.item.nbytes < _LARGE_NBYTES and 0 not in chunk.shape:
        return [(chunk.offset, stream)]
    with ExitStack() as opened:
        found = stream.stored(opened)
        if not isinstance(found, StoredTensor) or found.is_contiguous:
            return [(chunk.offset, stream)]
        return [
            (
                tuple(a + b for a, b in zip(chunk.offset, offset, strict=True)),
                view.as_streamed(),
            )
            for offset, view in found.boxes()
        ]


class ItemStream(StreamedArray):
    """The elements of one chunk, read from its item when the save asks for them.

    The item is open from the first box to the last, and what it holds must be what
    the metadata says of it.
    """

    def __init__(self, directory: Path, array: SourceArray, chunk: SourceChunk) -> None:
        self.shape = chunk.shape
        self.dtype = parse_dtype(array.dtype)
        self._directory = directory
        self._chunk = chunk
        self._key = array.key
        self.where = f"{directory / chunk.item.file} ({array.key})"
        self._elements: Any = None
        self._opened = ExitStack()

    def read(self, box: tuple[slice, ...]) -> Any:
        """Return the elements of a box."""
        try:
            if self._elements is None:
                found = self.stored(self._opened)
                is_tensor = isinstance(found, StoredTensor)
                self._elements = found.as_streamed() if is_tensor else found
            if isinstance(self._elements, StreamedArray):
                elements = self._elements.read(box)
            else:
                elements = self._elements[box]
        except BaseException:
            self._close()
            raise
        if all(part.stop == n for part, n in zip(box, self.shape, strict=True)):
            self._close()
        return elements

    def stored(self, opened: ExitStack) -> Any:
        """Return the tensor or array that the item holds, if it is the one expected.

        Parameters
        ----------
        opened : ExitStack
            Closes the item.

        Raises
        ------
        ManifestError
            If it has another shape or type.
        """
        item = self._chunk.item
        file = opened.enter_context(_opened(self._directory, item, self._key))
        arrays = _made(file, self.where)[1]
        if self._chunk.ordinal >= len(arrays):
            raise ManifestError(f"{self.where}: the item holds no such array")
        found = arrays[self._chunk.ordinal]
        if tuple(found.shape) != self.shape or found.dtype != self.dtype:
            raise ManifestError(
                f"{self.where}: the metadata says {self.dtype} of shape {self.shape}, "
                f"the item holds {found.dtype} of shape {tuple(found.shape)}"
            )
        return found

    def _close(self) -> None:
        self._elements = None
        self._opened.close()


class _Runs:
    """The runs of one item, which is opened, and verified, once for all of them."""

    def __init__(self, stream: ItemStream, chunk: SourceChunk) -> None:
        self.dtype = stream.dtype
        self.chunk = chunk
        self._stream = stream
        self._streams: list[StreamedArray] | None = None

    def streams(self) -> list[StreamedArray]:
        """Return what reads each run."""
        if self._streams is None:
            with ExitStack() as opened:
                found = self._stream.stored(opened)
                if not isinstance(found, StoredTensor) or not found.is_contiguous:
                    raise ManifestError(
                        f"{self._stream.where}: the item is no run of elements"
                    )
                self._streams = [
                    found.run(run.start, run.shape).as_streamed()
                    for run in self.chunk.runs
                ]
        return self._streams


class _RunStream(StreamedArray):
    def __init__(self, runs: _Runs, number: int) -> None:
        self.shape = runs.chunk.runs[number].shape
        self.dtype = runs.dtype
        self._runs = runs
        self._number = number

    def read(self, box: tuple[slice, ...]) -> Any:
        return self._runs.streams()[self._number].read(box)


def read_value(
    directory: Path, item: SourceItem, name: str
) -> tuple[Node, list[SourceArray]]:
    """Return the nodes of what an item holds, and the arrays in it.

    Parameters
    ----------
    directory : Path
        Of the checkpoint.
    item : SourceItem
        Where it is.
    name : str
        What the checkpoint calls it, for errors.

    Raises
    ------
    ManifestError
        If it is not made of plain values and arrays, or asks for anything else.
    """
    with _opened(directory, item, name) as file:
        node, found = _made(file, f"{directory / item.file} ({name})")
    return node, [_array(name, item, place, one) for place, one in enumerate(found)]


def unwrapped(node: Node) -> Node:
    """Return the only item of a list of one, and anything else as it is."""
    if isinstance(node, ListNode) and len(node.items) == 1:
        return node.items[0]
    return node


@contextmanager
def _opened(directory: Path, item: SourceItem, name: str) -> Iterator[TorchFile]:
    source = SourceFile(directory, item.file, item.start, item.nbytes, label=name)
    # Opened once for all of an item: opens are what a parallel file system is slow at.
    source.hold()
    try:
        yield TorchFile(source, read_head(source))
    finally:
        source.close()


def _made(file: TorchFile, where: str) -> tuple[Node, list[Any]]:
    nbytes = len(file.head.pickled)
    maker = NodeMaker(where, nbytes, lambda value: isinstance(value, StoredTensor))
    return maker.node(file.load(PLAIN_OBJECTS)), maker.arrays


def _array(name: str, item: SourceItem, ordinal: int, found: Any) -> SourceArray:
    shape = tuple(found.shape)
    chunk = SourceChunk((0,) * len(shape), shape, item, ordinal)
    return SourceArray(name, dtype_name(found.dtype), shape, (chunk,))
