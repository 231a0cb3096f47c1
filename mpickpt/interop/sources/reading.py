"""Says which rank reads which storage, and makes arrays of a state of them; no I/O."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.interop.sources.torch_file import TorchFile
from mpickpt.interop.sources.tree import SourceItem, share_out
from mpickpt.state import Shape, Sharded

Pieces = list[tuple[Shape, StoredTensor]]


class SourceReading:
    """One rank's share of the storages of some files; each is read by one rank.

    Parameters
    ----------
    files : mapping of str to TorchFile
        All files, on every rank the same.
    rank, size : int
        Which of how many ranks.
    """

    def __init__(self, files: Mapping[str, TorchFile], rank: int, size: int) -> None:
        self.rank = rank
        self._files = files
        items = [
            SourceItem(name, entry.header_offset, entry.nbytes)
            for name, file in files.items()
            for entry in file.storages_by_key.values()
        ]
        self._readers = share_out(items, size)

    def owns(self, tensor: StoredTensor) -> bool:
        """Tell whether this rank reads the storage of a tensor."""
        entry = tensor.file.storages_by_key[tensor.storage]
        name = tensor.file.source.relative
        item = SourceItem(name, entry.header_offset, entry.nbytes)
        return self._readers[item] == self.rank

    def whole(self, tensor: StoredTensor) -> Sharded:
        """Return a tensor as an array of the state."""
        pieces: Pieces = [((0,) * len(tensor.shape), tensor)]
        return self.array(tensor.shape, tensor.dtype, pieces)

    def array(
        self,
        shape: Shape,
        dtype: np.dtype[Any],
        pieces: Iterable[tuple[Shape, StoredTensor]],
        use: str = "",
    ) -> Sharded:
        """Return an array of the state that is made of boxes.

        Parameters
        ----------
        shape : tuple of int
            Shape of the whole array.
        dtype : numpy.dtype
            Its type; elements of another one are rounded to it.
        pieces : iterable of (offset, StoredTensor)
            Its boxes; those that other ranks read are left out here.
        use : str
            As in `StoredTensor.as_streamed`.
        """
        own = [
            (_sum(offset, inner), _elements(part, dtype, use))
            for offset, tensor in pieces
            if tensor.size and self.owns(tensor)
            for inner, part in tensor.boxes()
        ]
        return Sharded.pieces(own, global_shape=shape, dtype=dtype)

    def held(self, array: np.ndarray[Any, Any]) -> Sharded:
        """Return an array that all ranks have as one of the state, held by rank 0."""
        own = [((0,) * array.ndim, array)] if self.rank == 0 and array.size else []
        return Sharded.pieces(own, global_shape=array.shape, dtype=array.dtype)

    def unread(self) -> list[str]:
        """Return the files of which a part was to be read and was not."""
        return [name for name, file in self._files.items() if file.open_entries]

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


def _elements(tensor: StoredTensor, dtype: np.dtype[Any], use: str) -> Any:
    small = tensor.small()
    if small is not None:
        return small.astype(dtype)
    return tensor.as_streamed(cast=dtype, use=use)


def _sum(first: Shape, second: Shape) -> Shape:
    return tuple(a + b for a, b in zip(first, second, strict=True))
