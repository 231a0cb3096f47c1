"""Program: lets atheris, guided by coverage, look for input that breaks a parser.

hostile_atheris.py TARGET SEEDS LIBFUZZER-ARGUMENTS...: any exception that is none of
ours ends it with a file crash-... in the directory of -artifact_prefix.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["mpickpt"]):
    from mpickpt import CheckpointError
    from mpickpt.format.index import parse_index
    from mpickpt.format.layout_document import parse_layout_document
    from mpickpt.format.manifest import parse_manifest
    from mpickpt.planning.merge import merge, saved_tree, skeleton
    from mpickpt.planning.plain_values import leaf_paths, plain_value
    from mpickpt.storage.lease_file import LeaseRecord

import hashlib

import msgspec

from mpickpt.format.naming import key_of

NBYTES = 1 << 20
_DIGEST = re.compile(rb'("manifest_sha256": ")([0-9a-f]{64})(")')


def manifest(content: bytes) -> None:
    """Parse a manifest, signed where its digest can still be found."""
    found = _DIGEST.search(content)
    if found:
        blank = content.replace(found[0], found[1] + b"0" * 64 + found[3])
        own = hashlib.sha256(blank).hexdigest().encode()
        content = blank.replace(found[1] + b"0" * 64, found[1] + own)
    parse_manifest(content, where="here")


def index(content: bytes) -> None:
    """Parse an index, and go through its tree as the readers do."""
    tree = saved_tree(parse_index(content, nbytes=NBYTES, where="here"))
    merged, _ = skeleton(tree)
    for path in leaf_paths(merge([merged, tree])):
        key_of(path)
    plain_value(tree, lambda leaf: leaf.key)


def layout(content: bytes) -> None:
    """Parse a layout file."""
    parse_layout_document(content, "here")


def lease(content: bytes) -> None:
    """Parse a lease as `newest_claim` does."""
    try:
        record = msgspec.json.decode(content, type=LeaseRecord)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return
    record.identity.is_known_dead()


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": manifest,
    "index": index,
    "layout": layout,
    "lease": lease,
}


def main() -> None:
    target = TARGETS[sys.argv[1]]

    def test_one_input(content: bytes) -> None:
        try:
            target(content)
        except (CheckpointError, RecursionError) as error:
            # An open checkpoint and the index parser tell of too deep a nesting.
            if isinstance(error, RecursionError) and target is not index:
                raise

    if len(sys.argv) == 3 and Path(sys.argv[2]).is_file():
        test_one_input(Path(sys.argv[2]).read_bytes())
        return
    atheris.Setup([sys.argv[0], *sys.argv[2:]], test_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
