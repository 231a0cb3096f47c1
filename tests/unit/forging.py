"""Changes the files of a checkpoint as an enemy would: with every digest right."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpickpt.format.digest import crc32, crc32_hex, shard_blocks

Document = dict[str, Any]


def signed(text: str) -> bytes:
    """Return the text of a manifest, whose digest is 64 zeros, with the right one."""
    blank = text.encode("utf-8", "backslashreplace")
    return blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)


def forge_manifest(path: Path, change: Callable[[Document], Any]) -> None:
    """Change the parsed manifest of a checkpoint in place; sign it anew."""
    manifest = path / "manifest.json"
    document = json.loads(manifest.read_bytes())
    document = change(document) or document
    # First in the file, so that no other text of 64 zeros comes before it.
    fields = {"manifest_sha256": "0" * 64}
    fields |= {k: v for k, v in document.items() if k != "manifest_sha256"}
    manifest.write_bytes(signed(json.dumps(fields)))


def forge_index(
    path: Path, rank: int, change: Callable[[Document], Any], *, raw: bool = False
) -> None:
    """Change the index of a shard, as a document or as bytes, and all its digests.

    The table moves to the end of the file, behind an index of any length.
    """
    manifest = json.loads((path / "manifest.json").read_bytes())
    record = manifest["shards"][rank]
    shard = path / record["path"]
    content, (offset, nbytes, _) = shard.read_bytes(), record["index"]
    document = json.loads(content[offset : offset + nbytes])
    start = document["table"][0]
    body = content[:start]

    text = b""
    for _ in range(3):  # the place of the table stands in the index itself
        document["table"] = _table_after(len(body) + len(text))
        changed = json.loads(json.dumps(document))
        changed = change(changed) or changed
        text = changed if raw else json.dumps(changed).encode()
    body += text
    where, length = _table_after(len(body))
    crcs = [crc32(body[a:b]) for a, b in shard_blocks(where, length, where + length)]
    table = struct.pack(f"<{len(crcs)}I", *crcs)
    shard.write_bytes(body + table)

    def change_record(manifest: Document) -> None:
        manifest["shards"][rank] |= {
            "nbytes": len(body) + len(table),
            "index": [len(body) - len(text), len(text), crc32_hex(crc32(text))],
            "crc32": crc32_hex(crc32(table)),
            "sha256": hashlib.sha256(body + table).hexdigest(),
        }

    forge_manifest(path, change_record)


def forge_layout(path: Path, change: Callable[[Document], Any]) -> None:
    """Change the document of the layout file, and its digests in the manifest."""
    record = json.loads((path / "manifest.json").read_bytes())["layout"]
    offset, nbytes, _ = record["payload"]
    content = (path / record["path"]).read_bytes()
    document = json.loads(content[offset : offset + nbytes])
    text = json.dumps(change(document) or document).encode()
    (path / record["path"]).write_bytes(text)
    record |= {
        "nbytes": len(text),
        "payload": [0, len(text), crc32_hex(crc32(text))],
        "sha256": hashlib.sha256(text).hexdigest(),
    }
    forge_manifest(path, lambda manifest: manifest.update(layout=record))


def _table_after(nbytes: int) -> list[int]:
    return [nbytes, 4 * len(shard_blocks(nbytes, 0, nbytes))]
