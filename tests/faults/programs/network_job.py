"""MPI program: plays cases of the network suite, one after another.

Arguments: the processes of the nodes as JSON, the shared directory, a file for what
was found (a line of JSON for each case, as it ends), the names of the cases as JSON.
"""

import json
import sys
import traceback
from pathlib import Path

from tests.faults.programs.network_node import enter_node

NODE = enter_node(json.loads(sys.argv[1]), 0)

from mpi4py import MPI  # noqa: E402 (its threads could not change their mounts)

from tests.faults import (  # noqa: E402
    network_control,
    network_lease,
    network_saving,
    network_stale,
    network_unshared,
)
from tests.faults.network_scene import Scene  # noqa: E402

COMM = MPI.COMM_WORLD
MODULES = (
    *(network_saving, network_control, network_lease),
    *(network_stale, network_unshared),
)


def main() -> None:
    """Play them."""
    shared, results = map(Path, sys.argv[2:4])
    plays = {name: rest for module in MODULES for name, *rest in module.plays()}
    for name in json.loads(sys.argv[4]):
        writer, play = plays[name]
        scene = Scene(NODE, shared / name.replace("/", "-"), writer)
        COMM.barrier()
        begin = MPI.Wtime()
        try:
            play(scene)
        except Exception:
            scene.note("wrong_error", traceback.format_exc())
        notes = COMM.gather(scene.notes)
        if COMM.rank == 0:
            found = [note for of_rank in notes for note in of_rank]
            line = json.dumps([name, found, MPI.Wtime() - begin])
            with results.open("a") as file:
                file.write(line + "\n")


main()
