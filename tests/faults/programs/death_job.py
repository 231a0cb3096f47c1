"""MPI program: a job that saves or loads while ranks of it are killed.

``death_job.py FOLDER``, where ``case.json`` lies: mode, timeout_s, and who
is killed how. Ranks that live say in FOLDER what they raised, and wait to be killed.
"""

import contextlib
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

from mpickpt.parallel import pending, save, save_steps
from mpickpt.storage.catalog import step_path
from tests.crash.programs.injection import Fault, injected
from tests.faults.programs import errors_modes
from tests.faults.programs.death_modes import (
    Managed,
    before,
    meet,
    mode_named,
    strike_at,
    tell,
    use,
)

WORLD = MPI.COMM_WORLD
LONG_S = 300.0
# What a thread calls first at the moment that the list of calls names.
FIRST_CALLS: dict[str, tuple[tuple[Any, str], ...]] = {
    "write": ((save, "write_shard_file"), (pending, "write_staged_file")),
    "publish": ((save_steps.Save, "manifest"),),
}


def main(folder: Path) -> None:
    case = json.loads((folder / "case.json").read_text())
    run, mode = folder / "run", mode_named(case["mode"])
    restart_names = errors_modes.name_files_alike()
    comm = WORLD if case["kind"] == "call" else WORLD.Dup()
    use(WORLD, case["timeout_s"])
    mode.make_template(run)
    restart_names()
    use(comm, case["timeout_s"])
    if comm is not WORLD:
        # The duplicates are made, but the layout of a save is not agreed on yet.
        errors_modes.load(run, mode.old[0])
    mode.begin(run)
    pids = WORLD.allgather(os.getpid())
    with contextlib.ExitStack() as stack:
        arm(case, run, pids, stack)
        meet(WORLD)
        if WORLD.rank == 0:
            (folder / "armed").touch()
        meet(WORLD)
        if case["kind"] == "random":
            save_until_killed(mode)
        said = tell(mode)
    struck = folder / "struck"
    said["struck"] = float(struck.read_text()) if struck.exists() else None
    path = folder / f"rank{WORLD.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(said))
    path.with_suffix(".tmp").replace(path)
    time.sleep(LONG_S)


def arm(
    case: dict[str, Any], run: Path, pids: list[int], stack: contextlib.ExitStack
) -> None:
    """Prepare the killing, if it is this rank that is killed, or that kills."""
    if WORLD.rank != case["rank"]:
        return
    if case["kind"] == "call":
        arm_call(case, run, stack)
    elif case["kind"] == "random":
        command = f"sleep {case['after_s']}; kill -9 {' '.join(map(str, pids))}"
        subprocess.Popen(["sh", "-c", command], start_new_session=True)
    else:
        doomed = pids if case["kind"] == "all" else [os.getpid()]
        strike_at(case["moment"], lambda: kill(doomed, run.parent / "struck"))


def arm_call(case: dict[str, Any], run: Path, stack: contextlib.ExitStack) -> None:
    """Have strace kill this process: attached now, or to a thread at its moment."""
    paths = tuple(
        str(run / path) if path != "." else str(run) for path in case["paths"]
    )
    follows = case["way"] == "all"
    fault = Fault(rank=WORLD.rank, inject=case["inject"], threads=follows, path=paths)

    def attach() -> None:
        stack.enter_context(injected(fault, threading.get_native_id()))

    if case["way"] in ("all", "main"):
        attach()
        return
    for owner, name in FIRST_CALLS[case["way"]]:
        before(owner, name, attach)


def kill(pids: list[int], when: Path) -> None:
    when.write_text(str(time.monotonic()))  # one clock for all processes
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGKILL)


def save_until_killed(mode: Any) -> None:
    for step in range(3, 1_000_000):
        if isinstance(mode, Managed):
            mode.step = step
            mode.manager.save(step)
        else:
            path = step_path(mode.run, 2)
            errors_modes.save(mode.run, 2, value=step, overwrite=path.exists())


main(Path(sys.argv[1]))
