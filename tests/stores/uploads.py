"""Files to upload, and how the tests do it."""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

from mpickpt.storage.stores.store import Store, StoreOptions

MIB = 1 << 20
PART_NBYTES = 5 * MIB
# Gives up soon; and does not, however slow the machine is.
QUICK = StoreOptions(
    part_nbytes=PART_NBYTES,
    retry_for_s=1.0,
    connect_timeout_s=1.0,
    read_timeout_s=1.0,
)
PATIENT = StoreOptions(part_nbytes=PART_NBYTES, retry_for_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of random bytes."""

    path: Path
    content: bytes
    sha256: str

    def upload(self, store: Store, name: str, **how) -> None:
        """Upload it."""
        given = {"nbytes": len(self.content), "sha256": self.sha256} | how
        store.upload(name, self.path, **given)


def source_file(path: Path, nbytes: int, seed: int = 0) -> SourceFile:
    """Make a file of random bytes."""
    content = random.Random(seed).randbytes(nbytes)
    path.write_bytes(content)
    return SourceFile(
        path=path, content=content, sha256=hashlib.sha256(content).hexdigest()
    )
