"""Parses, checks and dumps `manifest.json`; touches no file.

The manifest is the one pointer to the shards of a checkpoint. Its bytes come from
a file system and are trusted only after `parse_manifest`, which raises nothing but
`ManifestError`, in time and memory linear in their number.
"""

import hashlib
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NoReturn

import msgspec

from mpickpt.errors import ManifestError
from mpickpt.format.dtypes import is_dtype_name
from mpickpt.format.naming import (
    parse_key,
    parse_layout_name,
    parse_shard_path,
    shard_path,
)
from mpickpt.format.records import (
    INT_MAX,
    NO_DIGEST,
    SCHEMA_VERSION,
    ArrayRecord,
    Document,
    LayoutRecord,
    ShardManifest,
    ShardRecord,
    Span,
)

__all__ = [
    "ArrayRecord",
    "LayoutRecord",
    "ShardManifest",
    "ShardRecord",
    "dump_manifest",
    "parse_manifest",
]

# Three times what 65,536 ranks need.
MAX_MANIFEST_NBYTES = 64 << 20
_DIGEST = "manifest_sha256"
_FIELDS = frozenset(ShardManifest.__struct_fields__) - {"extra"}
_ENCODER = json.JSONEncoder(sort_keys=True, allow_nan=False, ensure_ascii=False)
_Shards = tuple[ShardRecord, ...]
_Arrays = tuple[ArrayRecord, ...]
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 100


def parse_manifest(text: bytes, *, where: str) -> ShardManifest:
    """Return the manifest that `text` holds, after every check that needs no file.

    Parameters
    ----------
    text : bytes
        Content of `manifest.json`; may be anything.
    where : str
        Path that errors name.

    Raises
    ------
    ManifestError
        If it is not JSON, is of a newer schema, has another digest, or breaks a rule.
    """
    document = _parse_json(text, where)
    _check_schema_version(document, where)
    _check_digest(text, document, where)
    manifest = _convert(document, where)
    _check_rules(manifest, where)
    return manifest


def dump_manifest(manifest: ShardManifest) -> bytes:
    """Return the content of `manifest.json`, its digest computed.

    Keys are sorted, and each shard and each array has a line of its own.

    Raises
    ------
    ManifestError
        If `parse_manifest` would refuse the result.
    """
    where = f"manifest of step {manifest.step}"
    try:
        fields = _rendered(manifest)
    except (TypeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: cannot be written as JSON: {error}") from error
    fields[_DIGEST] = f'"{NO_DIGEST}"'
    text = _joined(fields)
    digest = hashlib.sha256(text).hexdigest()
    fields[_DIGEST] = f'"{digest}"'
    text = _joined(fields)
    _check_written(text, fields, where)
    return text


def _check_written(text: bytes, fields: dict[str, str], where: str) -> None:
    """Raise what `parse_manifest` would raise, in less time.

    The records, of which there may be a hundred thousand, are of fixed types: they have
    no key twice and no number that is not finite, for which Python's parser is needed.
    """
    if len(text) > MAX_MANIFEST_NBYTES:
        _refuse(where, "size", f"at most {MAX_MANIFEST_NBYTES} bytes", len(text))
    document = _parse_json(_joined(fields | {"shards": "[]", "arrays": "[]"}), where)
    _check_schema_version(document, where)
    _check_digest(text, document, where)
    read = _convert(document, where)
    try:
        shards = msgspec.json.decode(_utf8(fields["shards"]), type=_Shards)
        arrays = msgspec.json.decode(_utf8(fields["arrays"]), type=_Arrays)
    except msgspec.MsgspecError as error:
        raise ManifestError(f"{where}: {error}") from error
    _check_rules(msgspec.structs.replace(read, shards=shards, arrays=arrays), where)


def _rendered(manifest: ShardManifest) -> dict[str, str]:
    document: Document = msgspec.structs.asdict(manifest)
    extra = document.pop("extra")
    if known := extra.keys() & _FIELDS:
        raise ValueError(f"extra fields {sorted(known)} have the names of known ones")
    records = {name: _one_a_line(document.pop(name)) for name in ("shards", "arrays")}
    if layout := document.pop("layout"):
        records["layout"] = _line(layout)
    others = (document | extra).items()
    return records | {name: _ENCODER.encode(value) for name, value in others}


def _one_a_line(records: Iterable[msgspec.Struct]) -> str:
    lines = ",\n    ".join(map(_line, records))
    return f"[\n    {lines}\n  ]" if lines else "[]"


def _line(record: msgspec.Struct) -> str:
    compact = msgspec.json.encode(record, order="sorted")
    return msgspec.json.format(compact, indent=0).decode()


def _joined(fields: dict[str, str]) -> bytes:
    lines = (f"  {json.dumps(name)}: {fields[name]}" for name in sorted(fields))
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    return _utf8(text)


def _utf8(text: str) -> bytes:
    # Of all text JSON cannot hold in UTF-8 only lone surrogates, and their
    # backslash form is the JSON escape of the same character.
    return text.encode("utf-8", "backslashreplace")


def _parse_json(text: bytes, where: str) -> Document:
    if len(text) > MAX_MANIFEST_NBYTES:
        _refuse(where, "size", f"at most {MAX_MANIFEST_NBYTES} bytes", len(text))
    try:
        document = _DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: not a JSON manifest: {error}") from error
    if not isinstance(document, dict):
        _refuse(where, "document", "an object", document)
    return document


def _object(pairs: list[tuple[str, Any]]) -> Document:
    document = dict(pairs)
    if len(document) < len(pairs):
        [(name, count)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"key {_SHOWN.repr(name)} {count} times in one object")
    return document


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{_SHOWN.repr(text)} is not a finite number")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite
)


def _check_schema_version(document: Document, where: str) -> None:
    version = document.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise ManifestError(
            f"{where}: written by a newer mpickpt, schema {_SHOWN.repr(version)}; "
            f"this one reads {SCHEMA_VERSION}: upgrade mpickpt"
        )
    if type(version) is not int or version != SCHEMA_VERSION:
        _refuse(where, "schema_version", SCHEMA_VERSION, version)


def _check_digest(text: bytes, document: Document, where: str) -> None:
    stored = document.get(_DIGEST)
    if not isinstance(stored, str) or not re.fullmatch("[0-9a-f]{64}", stored):
        _refuse(where, _DIGEST, "64 lower-case hex digits", stored)
    own = f'"{_DIGEST}": "{stored}"'.encode()
    if (count := text.count(own)) != 1:
        _refuse(where, _DIGEST, f"{own.decode()} once in the file", f"{count} times")
    blank = text.replace(own, f'"{_DIGEST}": "{NO_DIGEST}"'.encode())
    actual = hashlib.sha256(blank).hexdigest()
    if actual != stored:
        _refuse(where, _DIGEST, stored, actual)


def _convert(document: Document, where: str) -> ShardManifest:
    known = {name: value for name, value in document.items() if name in _FIELDS}
    extra = {name: value for name, value in document.items() if name not in _FIELDS}
    try:
        return msgspec.convert(known | {"extra": extra}, ShardManifest)
    except msgspec.ValidationError as error:
        raise ManifestError(f"{where}: {_explained(str(error), document)}") from error
    except UnicodeEncodeError as error:
        # A lone surrogate where msgspec compares text with names it knows.
        raise ManifestError(f"{where}: unknown name: {error}") from error


def _explained(message: str, document: Document) -> str:
    # msgspec names the value it got only where the type is wrong.
    if not message.startswith("Expected") or ", got" in message:
        return message
    value: Any = document
    for name, number in re.findall(r"\.(\w+)|\[(\d+)\]", message.rpartition("$")[2]):
        value = value[name] if name else value[int(number)]
    return f"{message}, got {_SHOWN.repr(value)}"


def _check_rules(manifest: ShardManifest, where: str) -> None:
    if len(manifest.shards) != manifest.world_size:
        _refuse(where, "shards", f"{manifest.world_size} records", len(manifest.shards))
    start, size = 0, manifest.world_size
    for rank, shard in enumerate(manifest.shards):
        # Nearly all names have the id of the save: one comparison, and no parsing.
        usual = shard_path(rank, size, manifest.id8)
        _check_shard(shard, rank, size, usual, where)
        if shard.param_shard_offset != start:
            field = f"shards[{rank}].param_shard_offset"
            _refuse(where, field, start, shard.param_shard_offset)
        start += shard.param_shard_numel
    if start > INT_MAX:
        _refuse(where, "shards", f"at most {INT_MAX} elements", start)
    _check_arrays(manifest.arrays, where)
    if manifest.layout is not None:
        _check_layout(manifest.layout, where)


def _check_shard(
    shard: ShardRecord, rank: int, world_size: int, usual_path: str, where: str
) -> None:
    if shard.rank != rank:
        _refuse(where, f"shards[{rank}].rank", rank, shard.rank)
    if shard.path != usual_path:
        name = parse_shard_path(shard.path)
        id8 = name.id8 if name else "0" * 8
        expected = shard_path(rank, world_size, id8)
        if shard.path != expected:
            _refuse(
                where, f"shards[{rank}].path", f"a name like {expected}", shard.path
            )
    _check_span(shard.index, shard.nbytes, f"shards[{rank}].index", where)


def _check_arrays(arrays: tuple[ArrayRecord, ...], where: str) -> None:
    seen: set[str] = set()
    for number, array in enumerate(arrays):
        field = f"arrays[{number}]"
        if not _is_canonical(array.key):
            _refuse(where, f"{field}.key", "a canonical key", array.key)
        if array.key in seen:
            _refuse(where, f"{field}.key", "each key once", array.key)
        seen.add(array.key)
        if not is_dtype_name(array.dtype):
            _refuse(where, f"{field}.dtype", "a known dtype", array.dtype)
        _check_shape(array, field, where)


# The same keys come back at every save of a run.
@lru_cache(maxsize=1 << 16)
def _is_canonical(key: str) -> bool:
    try:
        parse_key(key)
    except ValueError:
        return False
    return True


def _check_shape(array: ArrayRecord, field: str, where: str) -> None:
    shape = array.global_shape
    if (shape is None) != (array.kind == "per_rank"):
        expected = "null" if array.kind == "per_rank" else "a shape"
        _refuse(where, f"{field}.global_shape", expected, shape)
    # numpy refuses shapes whose other lengths overflow even where one is 0.
    if shape is not None and math.prod(n for n in shape if n) > INT_MAX:
        _refuse(where, f"{field}.global_shape", f"at most {INT_MAX} elements", shape)


def _check_layout(layout: LayoutRecord, where: str) -> None:
    if parse_layout_name(layout.path) is None:
        _refuse(where, "layout.path", "a name like layout-<16 hex>.h5", layout.path)
    _check_span(layout.payload, layout.nbytes, "layout.payload", where)


def _check_span(span: Span, nbytes: int, field: str, where: str) -> None:
    offset, length, _ = span
    if offset + length > nbytes:
        _refuse(where, field, f"a range inside {nbytes} bytes", (offset, length))


def _refuse(where: str, field: str, expected: object, got: object) -> NoReturn:
    raise ManifestError(
        f"{where}: {field}: expected {expected}, got {_SHOWN.repr(got)}"
    )
