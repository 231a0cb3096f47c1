"""Gives what each saved rank had at one key, as a sequence that is read lazily."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload


class PerRankValues(Sequence[Any]):
    """What each saved rank had at one key; an item is read when it is asked for.

    Parameters
    ----------
    key : str
        For messages.
    size : int
        Number of ranks that saved.
    read : callable
        Gives the value of a rank; raises KeyError where it had none.
    """

    def __init__(self, key: str, size: int, read: Callable[[int], Any]) -> None:
        self._key = key
        self._size = size
        self._read = read

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...

    def __getitem__(self, rank: int | slice) -> Any:
        ranks = range(self._size)
        if isinstance(rank, slice):
            return [self._read(one) for one in ranks[rank]]
        try:
            return self._read(ranks[operator.index(rank)])
        except IndexError as error:
            raise IndexError(
                f"rank {rank}: the checkpoint was saved by {self._size} ranks"
            ) from error

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, range(self._size))

    def __repr__(self) -> str:
        return f"<PerRankValues {self._key!r} of {self._size} ranks>"
