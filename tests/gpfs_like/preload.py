"""Compiles the shim that stands for GPFS, and reads what was written under it."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

GPFS_MAGIC = 0x47504653

_SOURCE = Path(__file__).with_name("shim.c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One pwrite(2)."""

    offset: int
    nbytes: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GpfsLike:
    """A directory that programs with this environment take for one on GPFS."""

    directory: Path
    log: Path
    environment: dict[str, str]

    def written(self) -> list[Written]:
        """Return the writes below the directory, in order."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        fields = [line.split(" ", 2) for line in lines]
        return [
            Written(offset=int(offset), nbytes=int(nbytes), path=Path(path))
            for offset, nbytes, path in fields
        ]


def why_not() -> str | None:
    """Return what this machine lacks for the shim, or None."""
    return None if shutil.which("cc") else "no C compiler"


def gpfs_like(folder: Path, *, block_nbytes: int) -> GpfsLike:
    """Compile the shim; return a directory and the environment to use it with."""
    shim, directory = folder / "shim.so", folder / "gpfs"
    directory.mkdir()
    options = ["-shared", "-fPIC", "-O2", "-w"]
    subprocess.run(["cc", *options, "-o", shim, _SOURCE, "-ldl"], check=True)
    log = folder / "written"
    environment = {
        "LD_PRELOAD": str(shim),
        "SHIM_PREFIX": str(directory.resolve()),
        "SHIM_MAGIC": hex(GPFS_MAGIC),
        "SHIM_BLOCK": str(block_nbytes),
        "SHIM_LOG": str(log),
    }
    return GpfsLike(directory=directory, log=log, environment=environment)
