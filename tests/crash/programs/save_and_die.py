"""MPI program: one rank is killed before a system call of its save.

Arguments: directory of the checkpoint, and the fault as JSON.
"""

import contextlib
import json
import sys
from pathlib import Path

from mpi4py import MPI

from mpickpt import SaveOptions, save_sharded
from tests.crash.programs.injection import Fault, injected
from tests.crash.small_state import state_of

COMM = MPI.COMM_WORLD
OPTIONS = SaveOptions(block_nbytes=64 << 10, timeout_s=60)


def main() -> None:
    path, fault = Path(sys.argv[1]), Fault(**json.loads(sys.argv[2]))
    with contextlib.ExitStack() as stack:
        if COMM.rank == fault.rank:
            stack.enter_context(injected(fault))
        COMM.barrier()
        save_sharded(
            state_of(COMM.rank, 2),
            path,
            step=2,
            comm=COMM,
            options=OPTIONS,
        )
    print("survived", flush=True)


main()
