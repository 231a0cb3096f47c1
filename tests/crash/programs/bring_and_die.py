"""Restores on nodes that lack their shards; a rank is killed while they are brought.

Arguments: the folder of the disks, the step, and where rank 1 dies: "" is nowhere.
"""

import os
import signal
import sys
from pathlib import Path

from mpi4py import MPI

from mpickpt.parallel import node_publishing
from mpickpt.storage import incoming_file
from tests.local_tier import Disks, restore


def die(*_arguments: object, **_options: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(where: str) -> None:
    if where == "while a shard arrives":
        incoming_file.ShardFile.write_at = die
    elif where == "before a shard has its name":
        incoming_file.publish = die
    elif where == "before the manifest":
        node_publishing.publish_manifest = die


def main() -> None:
    folder, step, where = sys.argv[1:]
    comm = MPI.COMM_WORLD
    if comm.rank == 1:
        arm(where)
    disks = Disks(Path(folder), comm.size)
    places = [(rank + 1) % comm.size for rank in range(comm.size)]
    restored = restore(comm, disks, places, timeout_s=5.0)
    assert restored.step == int(step)
    if comm.rank == 0:
        print(f"restored: {restored.source}", flush=True)


main()
