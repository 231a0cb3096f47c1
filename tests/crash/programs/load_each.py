"""MPI program: loads each checkpoint in a folder, writes how every rank fared."""

import json
import sys
import time
from pathlib import Path

from mpi4py import MPI

from mpickpt import CheckpointError, load_sharded


def attempt(path: Path, verify: str) -> dict:
    begin = time.monotonic()
    try:
        outcome = load_sharded(path, comm=MPI.COMM_WORLD, verify=verify, timeout_s=60)
    except CheckpointError as error:
        outcome = error
    return {
        "class": type(outcome).__name__,
        "text": str(outcome) if isinstance(outcome, Exception) else "",
        "seconds": time.monotonic() - begin,
    }


def main() -> None:
    folder, results = map(Path, sys.argv[1:])
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    # "whole" comes last: every error lies behind it.
    cases = [(name, verify) for name in names for verify in ("sha256", "crc32")]
    said = {
        f"{name} {verify}": attempt(folder / name, verify) for name, verify in cases
    }
    gathered = MPI.COMM_WORLD.gather(said)
    if MPI.COMM_WORLD.rank == 0:
        results.write_text(
            json.dumps({n: [rank[n] for rank in gathered] for n in said})
        )


main()
