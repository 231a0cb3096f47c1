"""Opens files of torch.save without torch, and without running what is in them.

Such a file is a zip: a pickle that says what there is, and beside it the storages of
the tensors. Tensors come as `StoredTensor`, which say where their elements lie.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mpickpt.interop.sources.allowlist import (
    STANDARD,
    TensorClass,
    rebuild_parameter,
    rebuild_tensor,
    rebuild_typed_tensor,
)
from mpickpt.interop.sources.file import SourceFile
from mpickpt.interop.sources.restricted_unpickler import loads
from mpickpt.interop.sources.stored_entry import StoredEntry
from mpickpt.interop.sources.stored_tensor import StoredTensor
from mpickpt.interop.sources.stubs import StorageType, StubTensor
from mpickpt.interop.sources.torch_head import PICKLE, STORAGES, TorchHead, read_head
from mpickpt.interop.sources.torch_zip import ZipEntry

__all__ = ["StoredTensor", "TorchFile", "TorchHead", "open_torch_file", "read_head"]


@dataclass(frozen=True, slots=True)
class _Storage:
    """What a pickle says about a storage."""

    key: str
    dtype_name: str
    dtype: np.dtype[Any] | None
    nbytes: int


class TorchFile:
    """A file of torch.save, or a slice of a file that is one.

    Parameters
    ----------
    source : SourceFile
        Where it is.
    head : TorchHead
        What it says about itself.
    """

    def __init__(self, source: SourceFile, head: TorchHead) -> None:
        self.source = source
        self.head = head
        self._entries: dict[tuple[str, str], StoredEntry] = {}

    @property
    def is_checked(self) -> bool:
        """Whether the file has checksums to verify its tensors by."""
        return self.head.is_checked

    @property
    def open_entries(self) -> list[str]:
        """The storages of which something was announced that was not read yet."""
        return [key for (key, _), entry in self._entries.items() if not entry.is_done]

    def load(self, allow: Mapping[tuple[str, str], Any] = STANDARD) -> Any:
        """Return what was saved, with `StoredTensor` in the place of tensors.

        Parameters
        ----------
        allow : mapping of (module, name) to object
            What stands for each global that the pickle may name, beside those of
            tensors and plain values; see `restricted_unpickler.loads`.

        Raises
        ------
        ManifestError
            If the pickle asks for anything else, or describes what is not there.
        """
        return loads(
            self.head.pickled,
            allow={**STANDARD, **allow, **self._tensors()},
            persistent_load=self._storage,
            where=f"{self.source.where} ({PICKLE})",
        )

    def entry(self, storage: str, use: str = "") -> StoredEntry:
        """Return the reader of a storage, one for each use."""
        key = (storage, use)
        if key not in self._entries:
            directory = self.head.directory
            self._entries[key] = StoredEntry(
                self.source,
                f"{directory.folder}/{STORAGES}{storage}",
                directory.entries[STORAGES + storage],
                is_checked=self.is_checked,
            )
        return self._entries[key]

    def small_storage(self, storage: str) -> bytes | None:
        """Return the bytes of a storage of a few bytes, None of a longer one."""
        return self.head.small.get(storage)

    @cached_property
    def storages_by_key(self) -> dict[str, ZipEntry]:
        """Where each storage lies."""
        entries = self.head.directory.entries
        return {name.removeprefix(STORAGES): entry for name, entry in entries.items()}

    def close(self) -> None:
        """Close the file; its tensors open it again."""
        self.source.close()

    def _tensors(self) -> dict[tuple[str, str], Any]:
        def plain(*arguments: Any) -> StoredTensor:
            return self._stored(rebuild_tensor(*_untransformed(arguments, 6)))

        def typed(*arguments: Any) -> StoredTensor:
            return self._stored(rebuild_typed_tensor(*_untransformed(arguments, 7)))

        def of_type(function: Any, kind: Any, arguments: Any, _: Any = None) -> Any:
            known = (plain, typed, rebuild_parameter)
            if kind is not TensorClass or not any(function is each for each in known):
                raise TypeError("a tensor of a class of its own")
            return function(*arguments)

        return {
            ("torch._utils", "_rebuild_tensor_v2"): plain,
            ("torch._utils", "_rebuild_tensor_v3"): typed,
            ("torch._tensor", "_rebuild_from_type_v2"): of_type,
        }

    def _storage(self, identifier: Any) -> _Storage:
        kind, storage_type, key, _, count = identifier
        if kind != "storage" or not isinstance(storage_type, StorageType):
            raise TypeError("an identifier that is not that of a storage")
        entry = self.head.directory.entries.get(f"{STORAGES}{key}")
        itemsize = storage_type.dtype.itemsize
        if type(key) is not str or entry is None:
            raise LookupError(f"no storage {key!r} in the file")
        if type(count) is not int or count * itemsize != entry.nbytes:
            raise ValueError(
                f"storage {key!r} of {count} elements of {itemsize} bytes, for which "
                f"the file has {entry.nbytes}"
            )
        is_typed = storage_type.name != "UntypedStorage"
        dtype = storage_type.dtype if is_typed else None
        return _Storage(key, storage_type.dtype_name, dtype, entry.nbytes)

    def _stored(self, stub: StubTensor) -> StoredTensor:
        storage = stub.storage
        if not isinstance(storage, _Storage):
            raise TypeError("a tensor without a storage")
        dtype = storage.dtype if stub.dtype is None else stub.dtype.dtype
        if dtype is None or len(stub.shape) != len(stub.strides):
            raise TypeError("a tensor without a type, or with more strides than axes")
        tensor = StoredTensor(
            self, storage.key, dtype, stub.shape, stub.strides, stub.storage_offset
        )
        if tensor.size and tensor.span()[1] * dtype.itemsize > storage.nbytes:
            raise ValueError(
                f"a tensor of shape {tensor.shape} and strides {tensor.strides} at "
                f"{tensor.offset}, outside of its storage of {storage.nbytes} bytes"
            )
        return tensor


@contextmanager
def open_torch_file(
    path: Path, start: int = 0, nbytes: int | None = None
) -> Iterator[TorchFile]:
    """Open a file of torch.save, or a slice of a file.

    Parameters
    ----------
    path : Path
        The file; a regular one, and no symlink.
    start, nbytes : int, optional
        Where the slice begins, and its length; default the whole file.

    Raises
    ------
    IncompleteCheckpointError
        If it is missing or truncated.
    CorruptShardError
        If it is damaged.
    ManifestError
        If torch did not write it, or wrote it in its old format.
    """
    source = SourceFile(path.parent, path.name, start, nbytes)
    try:
        yield TorchFile(source, read_head(source))
    finally:
        source.close()


def _untransformed(arguments: tuple[Any, ...], metadata: int) -> tuple[Any, ...]:
    """Return the arguments of a tensor, unless its elements are not what is stored."""
    if len(arguments) > metadata and arguments[metadata]:
        raise TypeError("a tensor that is to be conjugated or negated")
    return arguments
