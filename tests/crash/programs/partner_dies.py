"""MPI program: ranks of two nodes save with copies, and one is killed on the way.

``partner_dies.py FOLDER RANK MOMENT HOW``. Ranks that live say in FOLDER what they
raised, and wait to be killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LONG_S = 300.0
BETWEEN = "PARTNER_DIES_BETWEEN"

if BETWEEN not in os.environ:
    # MPICH's mpiexec ends the other ranks when one dies. This process stays between
    # them: with all descriptors, for one of them leads to mpiexec.
    command = [sys.executable, *sys.argv]
    subprocess.run(command, close_fds=False, env={**os.environ, BETWEEN: "1"})
    time.sleep(LONG_S)

from mpi4py import MPI  # noqa: E402 (the process between must not initialise it)

from mpickpt import SaveOptions  # noqa: E402
from mpickpt.parallel import node_ground, partners  # noqa: E402
from mpickpt.parallel.communicators import conversations_of  # noqa: E402
from mpickpt.parallel.node_save import on_nodes  # noqa: E402
from mpickpt.parallel.pending import begin_save  # noqa: E402
from mpickpt.parallel.save_call import SaveCall  # noqa: E402
from tests.crash.small_state import state_of  # noqa: E402
from tests.node_saves import save_on_nodes  # noqa: E402

COMM = MPI.COMM_WORLD
MOMENTS = {
    "copy": (partners._Porter, "_send"),
    "publish": (node_ground, "_publish"),
}
ROWS = 300_000  # several pieces


def main(folder: Path, victim: int, moment: str, how: str) -> None:
    os.environ["SLURMD_NODENAME"] = f"n{COMM.rank // 2}"
    template = folder / "{node}"
    save(template, 1, how)
    COMM.Barrier()
    if COMM.rank == victim:
        owner, name = MOMENTS[moment]
        setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    said = {"class": None, "outcome": None, "missing_ranks": None, "text": ""}
    try:
        save(template, 2, how)
    except Exception as error:
        said = {"class": type(error).__name__, "text": str(error)}
        said |= {name: getattr(error, name, None) for name in ("outcome", "phase")}
        said["missing_ranks"] = getattr(error, "missing_ranks", None)
    path = folder / f"rank{COMM.rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(said))
    path.with_suffix(".tmp").replace(path)
    time.sleep(LONG_S)


def save(template: Path, step: int, how: str) -> None:
    state, options = state_of(COMM.rank, step, ROWS), SaveOptions()
    if how == "at once":
        save_on_nodes(state, template, step=step, comm=COMM, copies=1, options=options)
        return
    call = SaveCall(
        state=lambda: state,
        directory=template,
        step=step,
        metadata=None,
        metrics=None,
        overwrite=False,
        options=options,
        comm=COMM,
    )
    talks = conversations_of(COMM)
    call = on_nodes(call, template, copies=1)
    pending = begin_save(talks, call, progress="poll", on_busy="wait")
    assert pending is not None
    while not pending.poll():
        time.sleep(1e-3)
    pending.result()


main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
