"""MPI program: the next start after deaths: loads, saves again, looks for rubbish.

``death_next_start.py FOLDER``: ``runs.json`` lists run directories, each with the
mode that the dead job had. NUMBER.json tells what was found in each.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpickpt import CheckpointManager, latest
from mpickpt.format.naming import CONTROL_DIRECTORY, TMP_SUFFIX
from mpickpt.storage.catalog import checkpoints
from tests.crash.small_state import state_of
from tests.faults.errors_rubbish import rubbish_in
from tests.faults.programs import errors_modes
from tests.faults.programs.death_modes import Managed, mode_named, told, use

WORLD = MPI.COMM_WORLD
TIMEOUT_S = 30.0
LAST = 2_000_000
A_WHILE_S = 600.0


def run_case(run: Path, mode: Any) -> dict[str, Any]:
    comm = WORLD.Dup()
    use(comm, TIMEOUT_S)
    found = None
    if WORLD.rank == 0:
        let_time_pass(run)
        newest = latest(run)
        steps = [entry.step for entry in checkpoints(run)]
        found = {"newest": None if newest is None else steps[-1], "steps": steps}
    found = WORLD.bcast(found)
    values: dict[int, int] = {}

    def load_all() -> None:
        for step in found["steps"]:
            values[step] = errors_modes.load(run, step)

    said = {"found": found, "load": told(load_all), "values": list(values.items())}
    said["again"] = told(save_again, run, mode, comm, found["newest"])
    said["last"] = told(load_last, run, mode)
    WORLD.barrier()
    said["rubbish"] = rubbish_in(run) if WORLD.rank == 0 else []
    WORLD.barrier()
    return said


def let_time_pass(run: Path) -> None:
    """Make what the dead job was writing in ``.mpickpt`` look a while old.

    Somebody else might be writing it, so it is left alone for a minute.
    """
    for path in (run / CONTROL_DIRECTORY).rglob(f"*{TMP_SUFFIX}"):
        then = path.stat().st_mtime - A_WHILE_S
        os.utime(path, (then, then))


def save_again(run: Path, mode: Any, comm: Any, newest: int) -> None:
    """Go on as the program that died would."""
    if not isinstance(mode, Managed):
        errors_modes.save(run, mode.new[0], value=LAST, overwrite=True)
        return
    shown = [newest]
    with CheckpointManager(
        run,
        comm,
        state=lambda: state_of(comm.rank, shown[0], errors_modes.ROWS),
        keep=mode.keep,
        options=errors_modes.OPTIONS,
    ) as manager:
        restored = manager.restore_latest()
        assert restored is not None and restored.step == newest, restored
        shown[0] = LAST
        manager.save(manager.next_step, wait=True)


def load_last(run: Path, mode: Any) -> None:
    """Load what was just saved."""
    step = mode.new[0]
    if isinstance(mode, Managed):
        step = WORLD.bcast(checkpoints(run)[-1].step if WORLD.rank == 0 else None)
    assert errors_modes.load(run, step) == LAST


def main(folder: Path) -> None:
    for number, case in enumerate(json.loads((folder / "runs.json").read_text())):
        said = WORLD.gather(run_case(Path(case["run"]), mode_named(case["mode"])))
        if WORLD.rank == 0:
            path = folder / f"{number}.json"
            path.with_suffix(".tmp").write_text(json.dumps(said))
            path.with_suffix(".tmp").replace(path)


main(Path(sys.argv[1]))
