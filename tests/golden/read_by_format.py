"""Reads a checkpoint as FORMAT.md says, with the standard library and numpy alone.

It was written from that text and shares no code with mpickpt: where it fails to read
a checkpoint, the text, or the writer, is wrong. It checks every digest that there is.
"""

import base64
import hashlib
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_NBYTES = 16 << 20
# Bits of exponent and mantissa, bias, and the kind of special values.
FLOAT8 = {
    "float8_e4m3": (4, 3, 7, "ieee"),
    "float8_e3m4": (3, 4, 3, "ieee"),
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
    "float8_e4m3b11fnuz": (4, 3, 11, "fnuz"),
}
NAME_IN_SHARD = re.compile("(?:ranks[0-9]{5,}/)?rank[0-9]{5,}-[0-9a-f]{8}[.]h5")


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, Any], list]:
    """Return manifest, arrays by key, and the tree of each rank.

    Of a per-rank array, the value is a dict by rank. In trees, ("array", key) stands
    for an array.
    """
    manifest = read_manifest((directory / "manifest.json").read_bytes())
    records = {record["key"]: record for record in manifest["arrays"]}
    whole: dict[str, Any] = {}
    tiled: dict[str, Any] = {}
    for key, record in records.items():
        shape = record["global_shape"]
        whole[key] = {} if shape is None else None
        tiled[key] = None if shape is None else np.zeros(shape, int)
    trees = []
    for shard in manifest["shards"]:
        content, index = read_shard(directory, shard, manifest["world_size"])
        for array in index["arrays"]:
            key = array["key"]
            for place, offset, shape in array["parts"]:
                count = int(np.prod(shape, dtype=int))
                raw = b"" if place is None else content[place:]
                part = elements(array["dtype"], raw, count).reshape(shape)
                if tiled[key] is None:
                    whole[key][shard["rank"]] = part
                    continue
                assert array["shape"] == records[key]["global_shape"]
                if whole[key] is None:
                    whole[key] = np.empty(array["shape"], part.dtype)
                box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
                whole[key][box] = part
                tiled[key][box] += 1
        trees.append(decode(index["tree"], [a["key"] for a in index["arrays"]]))
    for key, count in tiled.items():
        assert count is None or (count == 1).all(), f"the parts of {key} do not tile it"
    return manifest, whole, trees


def read_manifest(text: bytes) -> dict[str, Any]:
    manifest = json.loads(text)
    assert manifest["schema_version"] == 1
    field = b'"manifest_sha256": "%s"'
    stored = field % manifest["manifest_sha256"].encode()
    assert text.count(stored) == 1
    zeroed = text.replace(stored, field % (b"0" * 64))
    assert hashlib.sha256(zeroed).hexdigest() == manifest["manifest_sha256"]
    assert [s["rank"] for s in manifest["shards"]] == [*range(manifest["world_size"])]
    return manifest


def read_shard(directory: Path, shard: dict[str, Any], size: int) -> tuple[bytes, Any]:
    assert NAME_IN_SHARD.fullmatch(shard["path"])
    content = (directory / shard["path"]).read_bytes()
    assert len(content) == shard["nbytes"]
    assert hashlib.sha256(content).hexdigest() == shard["sha256"]
    start, nbytes, crc = shard["index"]
    assert crc_of(content[start : start + nbytes]) == crc
    index = json.loads(content[start : start + nbytes])
    assert index["schema_version"] == 1
    assert (index["rank"], index["world_size"]) == (shard["rank"], size)
    start, nbytes = index["table"]
    table = content[start : start + nbytes]
    assert crc_of(table) == shard["crc32"]
    ranges = ((0, start), (start + nbytes, len(content)))
    starts = [(b, end) for a, end in ranges for b in range(a, end, BLOCK_NBYTES)]
    blocks = [content[b : min(b + BLOCK_NBYTES, end)] for b, end in starts]
    assert table == b"".join(struct.pack("<I", zlib.crc32(b)) for b in blocks)
    return content, index


def crc_of(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def elements(name: str, raw: bytes, count: int) -> Any:
    """Return `count` elements; what numpy has not, as the next larger float."""
    if name == "bfloat16":
        upper = np.frombuffer(raw, "<u2", count).astype("<u4")
        return (upper << 16).view("<f4")
    if name == "float8_e5m2":
        return (np.frombuffer(raw, "u1", count).astype("<u2") << 8).view("<f2")
    if name.startswith("float8"):
        return np.array([float8(name, code) for code in raw[:count]], np.float32)
    if "longdouble" in name:
        parts = count * (2 if "clong" in name else 1)
        numbers = [x87(raw[16 * i :][:16], name[0] == ">") for i in range(parts)]
        return np.array(numbers).view(complex if "clong" in name else float)
    dtype = np.dtype(name) if name[0] == ">" else np.dtype(name).newbyteorder("<")
    return np.frombuffer(raw, dtype, count)


def float8(name: str, code: int) -> float:
    if name == "float8_e8m0fnu":
        return np.nan if code == 0xFF else 2.0 ** (code - 127)
    exponent_bits, mantissa_bits, bias, special = FLOAT8[name]
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    sign = -1.0 if code & 0x80 else 1.0
    if special == "ieee" and exponent == (1 << exponent_bits) - 1:
        return np.nan if mantissa else sign * np.inf
    if (special == "fnuz" and code == 0x80) or (
        special == "fn" and code & 0x7F == 0x7F
    ):
        return np.nan
    if exponent:
        mantissa += 1 << mantissa_bits
    return sign * mantissa * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)


def x87(raw: bytes, big: bool) -> float:
    """Return an 80-bit float, rounded to a double."""
    mantissa, top = struct.unpack("<QH6x", raw[::-1] if big else raw)
    assert not any(raw[:6] if big else raw[10:])
    sign, exponent = (-1.0 if top >> 15 else 1.0), top & 0x7FFF
    if exponent == 0x7FFF:
        return np.nan if mantissa << 1 & (1 << 64) - 1 else sign * np.inf
    return float(sign * np.ldexp(float(mantissa), max(exponent, 1) - 16383 - 63))


def decode(node: Any, keys: list[str]) -> Any:
    """Return what a node of the tree holds; wrappers, names of classes are left out."""
    if isinstance(node, list):
        return [decode(child, keys) for child in node]
    if not isinstance(node, dict):
        return node
    if not any(name.startswith("$") for name in node):
        return {name: decode(child, keys) for name, child in node.items()}
    [(form, body)] = node.items()
    if form == "$array":
        return "array", keys[body]
    if form == "$tuple":
        return tuple(decode(child, keys) for child in body)
    if form in ("$dict", "$record"):
        pairs = body if form == "$dict" else body[1]
        return {decode(key, keys): decode(child, keys) for key, child in pairs}
    if form in ("$replicated", "$per_rank", "$live"):
        return decode(body[1], keys)
    return SCALARS[form](body)


SCALARS = {
    "$int": lambda body: int(body, 16),
    "$float": lambda body: struct.unpack(">d", bytes.fromhex(body))[0],
    "$complex": lambda body: complex(*struct.unpack(">dd", bytes.fromhex(body))),
    "$bytes": base64.b64decode,
    "$str": lambda body: base64.b64decode(body).decode("utf-8", "surrogatepass"),
    "$numpy": lambda body: elements(body[0], base64.b64decode(body[1]), 1)[0],
}
