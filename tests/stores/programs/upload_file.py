"""Uploads one file: URL NAME SOURCE SHA256 PART_NBYTES IN_FLIGHT."""

import sys
from pathlib import Path

from mpickpt.storage.stores.opening import open_store
from mpickpt.storage.stores.store import StoreOptions

url, name, source, sha256, part_nbytes, in_flight = sys.argv[1:]
options = StoreOptions(part_nbytes=int(part_nbytes), in_flight=int(in_flight))
open_store(url, options).upload(
    name, Path(source), nbytes=Path(source).stat().st_size, sha256=sha256
)
