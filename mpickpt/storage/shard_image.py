"""Lays out a shard as an HDF5 file without its data; knows h5py, touches no disk.

HDF5 creates the file in memory with contiguous, early-allocated datasets, and is
asked where each lies. What it wrote itself, its metadata, is kept as bytes. From
then on the shard is a list of regions of a file, and HDF5 is no longer needed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5p, h5s, h5t

from mpickpt.format.digest import TABLE_ITEM_NBYTES, n_blocks
from mpickpt.format.dtypes import (
    DTYPE_ATTRIBUTE,
    FloatFields,
    StorageSpec,
    storage_spec,
)
from mpickpt.format.naming import INDEX_DATASET, TABLE_DATASET
from mpickpt.storage.memory_file import MemoryFile

Offsets = tuple[int | None, ...]

_NAME = b"shard"
_MAX_NDIM = 32
_MAX_ATTEMPTS = 5
_SMALL_PER_ALIGNMENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """One dataset of a shard.

    Parameters
    ----------
    name : str
        Path in the HDF5 file, components escaped: "model/w", "frag/%piece0".
    dtype : dtype
        Type of the elements, in the byte order in which they are stored.
    shape : tuple of int
        Shape of the array; () and zero-size ones are legal.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardImage:
    """A shard as regions of a file; all offsets and lengths in bytes.

    Parameters
    ----------
    nbytes : int
        Size of the file.
    part_offsets : tuple of int or None
        Where each part lies, in the order given; None for parts without elements.
    index_offset, index_nbytes : int
        Where the index lies.
    table_offset, table_nbytes : int
        Where the table of CRC-32 values lies: after every part and the index.
    static : tuple of (int, bytes)
        Offset and content of HDF5's own regions, ascending. Bytes of the file that
        belong to no region are zero.
    """

    nbytes: int
    part_offsets: tuple[int | None, ...]
    index_offset: int
    index_nbytes: int
    table_offset: int
    table_nbytes: int
    static: tuple[tuple[int, bytes], ...]


def build_image(
    parts: Sequence[PartSpec],
    index_length: Callable[[Offsets], int],
    *,
    alignment: int = 4096,
) -> ShardImage:
    """Return the shard that holds these parts, an index and a table.

    Parameters
    ----------
    parts : sequence of PartSpec
        Datasets in the order in which they shall lie in the file.
    index_length : callable
        Gives the length of the index in bytes, at least 1, once the offsets of the
        parts are known.
    alignment : int
        Parts of at least 100 times this many bytes start at a multiple of it, so
        that padding stays under 1 % of the file.

    Notes
    -----
    The same arguments give the same bytes with the same HDF5 library: no times and
    no ids are stored. About 25 µs for each part.
    """
    n_crc: int | None = None
    for _ in range(_MAX_ATTEMPTS):
        image = _laid_out(parts, index_length, alignment, n_crc)
        # HDF5 may put metadata after the table, which is known only when the file
        # was closed; its blocks need entries of the table too.
        n_crc = _n_blocks_of(image)
        if image.table_nbytes == n_crc * TABLE_ITEM_NBYTES:
            return image
    raise RuntimeError("the table of the shard does not settle at a length")


def hdf5_version() -> str:
    """Return the version of the HDF5 library, on which a shard's bytes depend."""
    return str(h5py.version.hdf5_version)


def _laid_out(
    parts: Sequence[PartSpec],
    index_length: Callable[[Offsets], int],
    alignment: int,
    n_crc: int | None,
) -> ShardImage:
    memory = MemoryFile()
    access = _access(memory, alignment)
    file = h5f.create(_NAME, h5f.ACC_TRUNC, _creation(), access)
    maker = _DatasetMaker(file)
    offsets = tuple(maker.add_part(part) for part in parts)
    index_nbytes = index_length(offsets)
    index_offset = maker.add_text(INDEX_DATASET, index_nbytes)
    # Closing gives all metadata its place and forgets the gaps that alignment left,
    # so that the table comes last. The strategy without free space would do, but
    # puts the time in an extension of the superblock.
    file.close()
    length = n_blocks(memory.nbytes) if n_crc is None else n_crc
    file = h5f.open(_NAME, h5f.ACC_RDWR, access)
    table_offset = _DatasetMaker(file).add_table(TABLE_DATASET, length)
    file.close()
    if table_offset < max((index_offset, *filter(None, offsets))):
        raise RuntimeError("HDF5 laid the table of the shard before the arrays")
    return ShardImage(
        nbytes=memory.nbytes,
        part_offsets=offsets,
        index_offset=index_offset,
        index_nbytes=index_nbytes,
        table_offset=table_offset,
        table_nbytes=length * TABLE_ITEM_NBYTES,
        static=memory.runs(),
    )


def _n_blocks_of(image: ShardImage) -> int:
    after = image.nbytes - image.table_offset - image.table_nbytes
    return n_blocks(image.table_offset) + n_blocks(after)


def _creation() -> Any:
    creation = h5p.create(h5p.FILE_CREATE)
    # Of the root group; the datasets and the other groups each have their own.
    creation.set_obj_track_times(False)
    return creation


def _access(memory: MemoryFile, alignment: int) -> Any:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5fd.fileobj_driver, memory)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    # What HDF5 1.10 reads. Groups of this format do not keep times either.
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V110)
    access.set_alignment(_SMALL_PER_ALIGNMENT * alignment, alignment)
    return access


class _DatasetMaker:
    """Creates the datasets of one file and tells where they lie."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._types: dict[np.dtype[Any], tuple[StorageSpec, Any]] = {}
        self._creation = h5p.create(h5p.DATASET_CREATE)
        self._creation.set_layout(h5d.CONTIGUOUS)
        self._creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._creation.set_fill_time(h5d.FILL_TIME_NEVER)
        self._creation.set_obj_track_times(False)
        self._links = h5p.create(h5p.LINK_CREATE)
        self._links.set_create_intermediate_group(True)
        self._links.set_char_encoding(h5t.CSET_UTF8)

    def add_part(self, part: PartSpec) -> int | None:
        if part.dtype not in self._types:
            spec = storage_spec(part.dtype)
            self._types[part.dtype] = spec, _hdf5_type(spec)
        spec, datatype = self._types[part.dtype]
        extra = () if spec.extra_axis is None else (spec.extra_axis,)
        shape = (*part.shape, *extra)
        # HDF5 has 32 axes at most; the index tells the shape of such an array.
        if len(shape) > _MAX_NDIM:
            shape = (math.prod(shape),)
        dataset = self._add(part.name, datatype, shape)
        if spec.attribute is not None:
            _write_text_attribute(dataset, DTYPE_ATTRIBUTE, spec.attribute)
        offset: int | None = dataset.get_offset()
        return offset

    def add_text(self, name: str, nbytes: int) -> int:
        return int(
            self._add(name, _text_type(nbytes, h5t.STR_SPACEPAD), ()).get_offset()
        )

    def add_table(self, name: str, length: int) -> int:
        return int(self._add(name, h5t.STD_U32LE, (length,)).get_offset())

    def _add(self, name: str, datatype: Any, shape: tuple[int, ...]) -> Any:
        space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
        return h5d.create(
            self._file, name.encode(), datatype, space, self._creation, self._links
        )


def _hdf5_type(spec: StorageSpec) -> Any:
    if spec.float_fields is not None:
        return _float_type(spec.float_fields)
    return h5t.py_create(spec.numpy)


def _float_type(fields: FloatFields) -> Any:
    datatype = h5t.IEEE_F32LE.copy()
    # The order matters: each call checks that the fields fit the precision.
    datatype.set_fields(
        fields.sign_position,
        fields.exponent_position,
        fields.exponent_nbits,
        fields.mantissa_position,
        fields.mantissa_nbits,
    )
    datatype.set_ebias(fields.exponent_bias)
    datatype.set_precision(8 * fields.nbytes)
    datatype.set_size(fields.nbytes)
    return datatype


def _text_type(nbytes: int, padding: int) -> Any:
    datatype = h5t.C_S1.copy()
    datatype.set_size(nbytes)
    datatype.set_cset(h5t.CSET_UTF8)
    datatype.set_strpad(padding)
    return datatype


def _write_text_attribute(dataset: Any, name: str, text: str) -> None:
    content = np.array(text.encode())
    datatype = _text_type(content.itemsize, h5t.STR_NULLPAD)
    attribute = h5a.create(dataset, name.encode(), datatype, h5s.create(h5s.SCALAR))
    attribute.write(content, mtype=datatype)
