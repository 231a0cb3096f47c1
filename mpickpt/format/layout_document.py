"""Dumps and parses the layout: which shard holds which box; touches no file.

The layout is the text of a checkpoint's layout file. From it a reader of a slice
knows which shards to open, without asking the index of each.
"""

import itertools
from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

from mpickpt.errors import ManifestError
from mpickpt.format.corners import first_outside
from mpickpt.format.hyperslab import Hyperslab, whole

KINDS = ("sharded", "replicated", "per_rank", "replicated_plain")
SCHEMA_VERSION = 1

Shape = tuple[int, ...]
Ranks = range | tuple[int, ...]
D = TypeVar("D", bound=msgspec.Struct)

_INT64_MAX = 2**63 - 1
_MAX_NDIM = 64
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Step = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Extent = Annotated[int, msgspec.Meta(ge=0, le=_INT64_MAX)]
_Index = Annotated[tuple[_Extent, ...], msgspec.Meta(max_length=_MAX_NDIM)]


class LayoutEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One array as the layout file lists it.

    Attributes
    ----------
    key, kind, dtype, global_shape
        As in `records.ArrayRecord`; `dtype` is that of the lowest rank for
        per-rank arrays, whose `global_shape` is None.
    parts : tuple of (int, Hyperslab)
        The boxes that are stored, each with the rank whose shard holds it; they
        tile the array. Empty for per-rank arrays.
    holders : range or tuple of int
        For per-rank arrays, the ranks that hold one. Empty for all others.
    """

    key: str
    kind: str
    dtype: str
    global_shape: Shape | None
    parts: tuple[tuple[int, Hyperslab], ...]
    holders: Ranks = ()


def dump_layout_document(entries: Sequence[LayoutEntry]) -> bytes:
    """Return the layout file's JSON: UTF-8, keys sorted, one array a line.

    Equal layouts give equal bytes, in whatever order the entries come.
    """
    ordered = sorted(entries, key=lambda entry: entry.key)
    return join_layout_lines([dump_layout_line(entry) for entry in ordered])


def dump_layout_line(entry: LayoutEntry) -> bytes:
    """Return the line of one array."""
    return msgspec.json.encode(_line_of(entry), order="sorted")


def join_layout_lines(lines: Sequence[bytes]) -> bytes:
    """Return the layout file's JSON from the lines of its arrays, sorted by key."""
    body = b",\n".join(lines)
    version = b"%d" % SCHEMA_VERSION
    return b'{"arrays":[\n' + body + b'\n],"schema_version":' + version + b"}\n"


def parse_layout_document(document: bytes, where: str) -> list[LayoutEntry]:
    """Return the entries of a layout file.

    Parameters
    ----------
    document : bytes
        JSON as `dump_layout_document` writes it; white space may follow.
    where : str
        The file, for messages.

    Returns
    -------
    list of LayoutEntry
        In the order of their keys. Parts lie inside their arrays and have the right
        number of elements in all; that they do not overlap is not checked.

    Raises
    ------
    ManifestError
        Anything that this version does not write: other schema, other form, unknown
        field or kind, key given twice, part outside its array.
    """
    version = _decoded(document, _Version, where).schema_version
    if version != SCHEMA_VERSION:
        raise ManifestError(
            f"{where}: layout of schema {version}; expected {SCHEMA_VERSION}: it was "
            "written by another mpickpt, upgrade this one"
        )
    lines = _decoded(document, _Document, where).arrays
    entries = [_entry_of_line(line) for line in lines]
    for entry in entries:
        fault = _fault_of(entry)
        if fault:
            raise _malformed(where, f"array {entry.key!r} has {fault}")
    if len({entry.key for entry in entries}) != len(entries):
        raise _malformed(where, "a key is there twice")
    # One form only, so no field is given twice and equal layouts are equal files.
    if dump_layout_document(entries) != document.rstrip() + b"\n":
        raise _malformed(where, "it is not in the form that is written")
    return entries


class _ArrayLine(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    key: str
    kind: str
    dtype: str
    global_shape: _Index | None = None
    parts: tuple[tuple[_Rank, _Index, _Index], ...] = ()
    rank_range: tuple[_Rank, _Rank, _Step] | None = None
    ranks: tuple[_Rank, ...] = ()


class _Version(msgspec.Struct):
    schema_version: int


class _Document(_Version, forbid_unknown_fields=True):
    arrays: list[_ArrayLine]


def _line_of(entry: LayoutEntry) -> _ArrayLine:
    ranks = entry.holders
    span = (ranks.start, ranks.stop, ranks.step) if isinstance(ranks, range) else None
    return _ArrayLine(
        key=entry.key,
        kind=entry.kind,
        dtype=entry.dtype,
        global_shape=entry.global_shape,
        parts=tuple((rank, box.offset, box.shape) for rank, box in entry.parts),
        rank_range=span,
        ranks=() if span else tuple(ranks),
    )


def _entry_of_line(line: _ArrayLine) -> LayoutEntry:
    return LayoutEntry(
        key=line.key,
        kind=line.kind,
        dtype=line.dtype,
        global_shape=line.global_shape,
        parts=tuple((rank, Hyperslab(*box)) for rank, *box in line.parts),
        holders=range(*line.rank_range) if line.rank_range else line.ranks,
    )


def _decoded(document: bytes, form: type[D], where: str) -> D:
    try:
        return msgspec.json.decode(document, type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _malformed(where, str(error)) from error


def _malformed(where: str, fault: str) -> ManifestError:
    return ManifestError(
        f"{where}: the layout cannot be read: {fault}; expected the JSON of "
        f"schema {SCHEMA_VERSION}: the file is damaged or was not written by mpickpt"
    )


def _fault_of(entry: LayoutEntry) -> str | None:
    """Return what is wrong with one array, None if nothing is."""
    shape, n_parts = entry.global_shape, len(entry.parts)
    if entry.kind not in KINDS:
        return f"kind {entry.kind!r}; expected one of {', '.join(KINDS)}"
    if entry.kind == "per_rank":
        is_bare = shape is None and not n_parts
        return _fault_of_holders(entry.holders) if is_bare else "a shape or parts"
    if entry.holders:
        return f"holders, which kind {entry.kind!r} does not list"
    if entry.kind == "replicated_plain":
        is_point = shape is None and n_parts == 1
        return _fault_of_parts(entry, ()) if is_point else "a shape, or not one part"
    if shape is None or not entry.dtype:
        return "no global_shape or no dtype"
    return _fault_of_parts(entry, shape)


def _fault_of_holders(holders: Ranks) -> str | None:
    if not holders:
        return "no holders"
    if isinstance(holders, range):
        return None
    ascend = all(a < b for a, b in itertools.pairwise(holders))
    return None if ascend else "ranks that do not ascend"


def _fault_of_parts(entry: LayoutEntry, global_shape: Shape) -> str | None:
    parts = [part for _, part in entry.parts]
    outside = first_outside(whole(global_shape), parts)
    if outside is not None:
        return f"a part of {_box_text(parts[outside])} outside its shape {global_shape}"
    if any(part.is_empty for part in parts):
        return "a part without elements"
    stored, expected = sum(part.size for part in parts), whole(global_shape).size
    if stored != expected:
        return f"{stored} elements in its parts; expected {expected}"
    return None


def _box_text(box: Hyperslab) -> str:
    return f"offset {box.offset}, shape {box.shape}"
