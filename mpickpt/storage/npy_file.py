"""Writes one .npy file through a memory map; visible only when it is whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from mpickpt.format.naming import TMP_SUFFIX
from mpickpt.storage.array_reader import Array
from mpickpt.storage.commit import (
    close_file,
    create_file,
    discard,
    publish,
    storage_errors,
    sync_file,
)


@contextmanager
def new_npy_file(
    path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Iterator[Array]:
    """Give an array to be filled, which then is the content of a new .npy file.

    Parameters
    ----------
    path : Path
        The file; one that is there is replaced, at once, when the body has ended.
    dtype : dtype
        Type of the elements.
    shape : tuple of int
        Shape of the array; it may be larger than the memory.

    Raises
    ------
    StorageError
        If the file system refuses; nothing is left behind.

    Notes
    -----
    Durable when it returns.
    """
    tmp = path.with_name(f"{path.name}.{os.getpid()}{TMP_SUFFIX}")
    descriptor = create_file(tmp)
    try:
        try:
            offset = _write_header(descriptor, tmp, dtype, shape)
            yield _mapped(descriptor, tmp, offset, dtype, shape)
            sync_file(descriptor, tmp)
        finally:
            close_file(descriptor, tmp)
        publish(tmp, path)
    except BaseException:
        discard(tmp)
        raise


def _write_header(
    descriptor: int, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> int:
    header = {
        "descr": npy_format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    with (
        storage_errors("write", path),
        os.fdopen(descriptor, "wb", closefd=False) as file,
    ):
        npy_format.write_array_header_1_0(file, header)
        return file.tell()


def _mapped(
    descriptor: int, path: Path, offset: int, dtype: np.dtype[Any], shape: Any
) -> Array:
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    with storage_errors("write", path):
        # A full disk would else kill the process at its first touch of a page.
        os.posix_fallocate(descriptor, offset, nbytes)
        return np.memmap(path, dtype, "r+", offset, shape)
