"""MPI program: jobs of four ranks, side by side, in which one is stopped for a while.

``death_stops.py FOLDER``: ``cases.json`` lists the cases. Each team of four takes
some of them; a case leaves NAME.json with what its ranks said. A communicator that was
given up is never used again: each case makes one.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI

from tests.faults.programs import errors_modes
from tests.faults.programs.death_modes import (
    leave,
    meet,
    mode_named,
    new_copy,
    strike_at,
    tell,
    use,
)

WORLD = MPI.COMM_WORLD
SIZE = 4


class Victim:
    """The rank of a team that stops itself."""

    def __init__(self, team: Any, case: dict[str, Any]) -> None:
        self.rank = case["rank"]
        self.is_this = team.rank == self.rank
        self.pid = team.allgather(os.getpid())[self.rank]
        self.slow_s = case.get("slow_s")
        self.struck: float | None = None

    def stop(self) -> None:
        """Stop this process; where it is only slow, it goes on by itself."""
        self.struck = time.monotonic()
        if self.slow_s:
            command = f"sleep {self.slow_s}; kill -CONT {self.pid}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)
        # To this thread: another one may take a while to take what the process gets.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


def run_case(team: Any, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    mode, run = mode_named(case["mode"]), folder / case["name"].replace("/", "-")
    template = folder / f"template-{team.name}-{mode.name}"
    if not template.exists():
        meet(team)
        use(team.Dup(), 60)
        mode.make_template(template)
    meet(team)
    new_copy(mode, template, run, team)
    comm = team.Dup()
    others = team.Split(team.rank == case["rank"], team.rank)
    use(comm, case["timeout_s"])
    errors_modes.load(run, mode.old[0])
    mode.begin(run)
    victim = Victim(team, case)
    if victim.is_this:
        strike_at(case["moment"], victim.stop)
    meet(team)
    rescue = threading.Timer(case["hung_s"], victim.go_on)
    rescue.daemon = True
    if not victim.is_this:
        rescue.start()
    said = tell(mode)
    if not victim.is_this:
        meet(others)
        rescue.cancel()
        victim.go_on()
    meet(team)
    leave(mode)
    others.Free()
    return said | {"struck": team.bcast(victim.struck, case["rank"])}


def main(folder: Path) -> None:
    errors_modes.name_files_alike()
    number, n_teams = WORLD.rank // SIZE, WORLD.size // SIZE
    team = WORLD.Split(number, WORLD.rank)
    team.name = str(number)
    cases = json.loads((folder / "cases.json").read_text())
    for case in cases[number::n_teams]:
        said = team.gather(run_case(team, case, folder))
        if team.rank == 0:
            path = folder / f"{case['name'].replace('/', '-')}.json"
            path.with_suffix(".tmp").write_text(json.dumps(said))
            path.with_suffix(".tmp").replace(path)
        meet(team)
    meet(WORLD)


main(Path(sys.argv[1]))
