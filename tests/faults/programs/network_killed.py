"""MPI program: one rank is killed in mid-save, or a run is resumed on other nodes.

Arguments: the processes of the nodes as JSON, by how many nodes ranks are shifted, the
shared directory, then "kill", rank, mode, name before whose renaming the rank dies, or
"resume", a file for what was found, and names of runs.
"""

import json
import os
import signal
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from tests.faults.programs.network_node import enter_node

NODE = enter_node(json.loads(sys.argv[1]), int(sys.argv[2]))

from mpi4py import MPI  # noqa: E402 (its threads could not change their mounts)

from tests.faults.network_control import resume  # noqa: E402
from tests.faults.network_scene import Scene  # noqa: E402

COMM = MPI.COMM_WORLD
OLDER, NEWER, LATER = 1, 2, 3


def main() -> None:
    """Do what was asked for."""
    shared = Path(sys.argv[3])
    if sys.argv[4] == "kill":
        name, rank, mode, pattern = sys.argv[5:]
        save_and_die(Scene(NODE, shared / name), int(rank), mode, pattern)
        return
    found = {}
    for name in sys.argv[6:]:
        scene = Scene(NODE, shared / name)
        resume(scene, OLDER, NEWER, LATER)
        notes = COMM.gather(scene.notes)
        found[name] = [note for of_rank in notes or () for note in of_rank]
    if COMM.rank == 0:
        Path(sys.argv[5]).write_text(json.dumps(found))


def save_and_die(scene: Scene, rank: int, mode: str, pattern: str) -> None:
    """Save a step, then die of the next one."""
    scene.save("manager", OLDER, COMM)
    scene.together()

    def die(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and fnmatchcase(str(arguments[0]), pattern):
            os.kill(os.getpid(), signal.SIGKILL)

    if COMM.rank == rank:
        sys.addaudithook(die)
    scene.save(mode, NEWER, COMM)
    print("survived", flush=True)


main()
